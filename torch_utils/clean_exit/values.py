"""What options may be: each is made from its text, on the command line and in settings alike."""

from __future__ import annotations

import argparse
import math
import re
import signal


def seconds(text: str) -> float:
    """Read a length of time that is more than nothing."""
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 seconds")
    return value


def seconds_or_none(text: str) -> float:
    """Read a length of time, which may be 0."""
    value = _number(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0 seconds")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is not a length of time")
    return value


def count(text: str) -> int:
    """Read a number of times."""
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def exit_code(text: str) -> int:
    """Read an exit code."""
    value = _whole(text)
    if not 1 <= value <= 255:  # 0 would say that all is well.
        raise argparse.ArgumentTypeError(f"{text} is not an exit code of a failure (1 to 255)")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def stop_signal(text: str) -> int:
    """Read a signal: TERM, SIGTERM or 15."""
    name = text.upper()
    try:
        if name.isdigit():
            return signal.Signals(int(name)).value
        return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"].value
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text} is not a signal") from None


def pattern(text: str) -> str:
    """Read a regular expression, and leave it text."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


COLORS = ("auto", "always", "never")


def color(text: str) -> str:
    """Read when to use colours."""
    if text not in COLORS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(COLORS)}")
    return text
