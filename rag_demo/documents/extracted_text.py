"""A text that was extracted from a file, with the position in the file of each part."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExtractedText:
    """A text and the positions of its parts.

    Attributes:
        text: The text.
        unit: The unit of positions: "line", "cell" or "page"; the first one is 1.
        starts: Where parts begin in the text, in ascending order.
        numbers: The position of each part in the file.
        anchors: The id before each part that a link can refer to.
    """

    text: str
    unit: str
    starts: Sequence[int]
    numbers: Sequence[int]
    anchors: Sequence[str | None] = ()

    @classmethod
    def of(cls, unit: str, parts: Iterable[tuple[str, int, str | None]]) -> ExtractedText:
        """Join pieces of text, each with its position and the id before it."""
        pieces, numbers, anchors = list(zip(*parts, strict=True)) or ((), (), ())
        starts, length = [], 0
        for piece in pieces:
            starts.append(length)
            length += len(piece)
        return cls("".join(pieces), unit, starts, numbers, anchors)

    def place(self, offset: int) -> dict[str, int | str]:
        """Return the position of an offset in the text as metadata, with the anchor before it."""
        part = bisect_right(self.starts, offset) - 1
        if part < 0:
            return {}
        found: dict[str, int | str] = {self.unit: self.numbers[part]}
        if self.anchors and (anchor := self.anchors[part]):
            found["anchor"] = anchor
        return found


def with_lines(text: str) -> ExtractedText:
    """Return a text with the positions of its lines."""
    starts = [0, *(found.end() for found in re.finditer("\n", text))]
    return ExtractedText(text, "line", starts, range(1, len(starts) + 1))
