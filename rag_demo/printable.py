"""Make text from documents, files and models safe to print on a terminal."""

from __future__ import annotations

import re

# Control characters can move the cursor, rename the window or type commands. Other characters
# reverse the order of text. Lone surrogates, from undecodable file names, cannot be encoded.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: object) -> str:
    r"""Escape harmful characters, for example as "\\x1b". Line breaks stay."""
    return _HARMFUL.sub(lambda found: ascii(found.group())[1:-1], str(text))


def on_one_line(text: object) -> str:
    """Escape harmful characters, and turn each run of whitespace into one space."""
    return printable(" ".join(str(text).split()))
