"""What others wrote, made fit for a terminal: the one place that all that is shown passes."""

from __future__ import annotations

import re

__all__ = ["on_one_line", "printable"]

# Control characters, with which a text can move the cursor, rename the window or answer in the
# user's name; marks that reverse the order of what follows; halves of surrogate pairs, which
# stand for undecodable bytes of file names and cannot be encoded.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: object) -> str:
    r"""Return a text with what a terminal would obey written out, as "\\x1b"; lines stay lines."""
    return _HARMFUL.sub(lambda found: ascii(found.group())[1:-1], str(text))


def on_one_line(text: object) -> str:
    """Do the same, with every run of whitespace as one space."""
    return printable(" ".join(str(text).split()))
