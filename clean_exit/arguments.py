"""Types of arguments that both commands take."""

from __future__ import annotations

import argparse


def filled(text: str) -> str:
    """Refuse an empty value, as a variable that is not set gives it."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def output_file(text: str) -> str:
    """Refuse what cannot be meant: no name, and a program instead of a report."""
    if filled(text).endswith(".py"):
        raise argparse.ArgumentTypeError(f"would overwrite the program {text}; name another file")
    return text
