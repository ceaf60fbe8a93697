"""Check and convert the arguments of hosts, pools and leases."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from typing import Any

Devices = int | Mapping[str, int]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_KEEP_ALIVE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h)")


def parse_keep_alive(value: object) -> float:
    """Return a keep-alive time in seconds, which is infinite for -1.

    Raises:
        TypeError: It is not a number or a str.
        ValueError: It has none of the forms that `ModelHost` lists.
    """
    use = 'use seconds, "90s", "10m", "1h", 0 to unload after the last lease, or -1 to never unload'
    seconds: Any = {"0": 0.0, "-1": -1.0}.get(value, value) if isinstance(value, str) else value
    if isinstance(seconds, str) and (match := _KEEP_ALIVE.fullmatch(seconds.strip())):
        seconds = float(match[1]) * _UNITS[match[2]]
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"keep_alive is invalid: {value!r}; {use}")
    if isinstance(seconds, str) or not (seconds == -1 or 0 <= seconds <= threading.TIMEOUT_MAX):
        raise ValueError(f"keep_alive is invalid: {value!r}; {use}")
    return math.inf if seconds == -1 else float(seconds)


_DEVICE = re.compile(r"host|(?!cpu)[a-z]+:[0-9]+")


def parse_sizes(argument: str, value: Devices, device: str) -> dict[str, int]:
    """Return sizes by device; a number counts for ``device``."""
    sizes = dict(value) if isinstance(value, Mapping) else {device: value}
    if isinstance(value, Mapping) and not (
        sizes and all(isinstance(key, str) and _DEVICE.fullmatch(key) for key in sizes)
    ):
        raise ValueError(f'{argument} must have keys such as "host" or "cuda:0", got {sizes!r}')
    for key, size in sizes.items():
        check_positive(argument if key == device else f"{argument}[{key!r}]", size)
    return sizes


def check_positive(argument: str, value: object) -> None:
    """Check that an argument is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be a whole number, such as 4 << 30, got {value!r}")
    if value <= 0:
        raise ValueError(f"{argument} must be positive, got {value!r}")


def check_seconds(name: str, value: object) -> None:
    """Check that an argument is a number of seconds.

    Raises:
        TypeError: It is not a number.
        ValueError: It is negative, NaN or longer than the longest possible wait.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}")
    if not 0 <= value <= threading.TIMEOUT_MAX:
        raise ValueError(f"{name} must be finite and at least 0 seconds, got {value!r}")
