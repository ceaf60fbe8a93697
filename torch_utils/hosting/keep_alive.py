"""How long an idle model is kept: seconds, "90s", "10m", "1h", 0, or -1 for ever."""

from __future__ import annotations

import math
import re

__all__ = ["parse_keep_alive"]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h)")
_USE = 'use seconds, "90s", "10m", "1h", 0 to unload when the last lease ends, or -1 for never'


def parse_keep_alive(value: object) -> float | None:
    """Return the seconds, or None for ever.

    Raises:
        TypeError: It is neither a number nor a text.
        ValueError: It is none of the forms.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"keep_alive cannot be {value!r}; {_USE}")
    if isinstance(value, str):
        text = value.strip()
        if text in ("0", "-1"):
            return None if text == "-1" else 0.0
        if not text or _PART.sub("", text):
            raise ValueError(f"keep_alive cannot be {value!r}; {_USE}")
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if value == -1:
        return None
    if value < 0 or not math.isfinite(value):
        raise ValueError(f"keep_alive cannot be {value!r}; {_USE}")
    return float(value)
