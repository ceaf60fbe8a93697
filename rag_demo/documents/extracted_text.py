"""A text that was taken out of a file, and where in the file each part of it stands."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["ExtractedText", "TextBuilder", "lines_of"]


@dataclass(frozen=True)
class ExtractedText:
    """A text and the places of its parts.

    Attributes:
        text: What is read.
        unit: What the places count: "line", "cell" or "page"; the first one is 1.
        starts: Where in the text parts begin, in ascending order.
        numbers: The place of each part.
        anchors: Names that a link can lead to.
        anchored: The number of the part that each of them stands before, in ascending order.
    """

    text: str
    unit: str
    starts: array[int]
    numbers: Sequence[int]
    anchors: list[str] = field(default_factory=list)
    anchored: array[int] = field(default_factory=lambda: array("q"))

    def place(self, offset: int) -> dict[str, int | str]:
        """Say where in the file an offset is, as metadata: line, cell or page, and the anchor."""
        part = bisect_right(self.starts, offset) - 1
        if part < 0:
            return {}
        found: dict[str, int | str] = {self.unit: self.numbers[part]}
        anchor = bisect_right(self.anchored, part) - 1
        if anchor >= 0:
            found["anchor"] = self.anchors[anchor]
        return found


class TextBuilder:
    """A `ExtractedText` in the making."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._pieces: list[str] = []
        self._length = 0
        self._starts, self._numbers = array("q"), array("q")
        self._anchors: list[str] = []
        self._anchored = array("q")

    def add(self, piece: str, number: int | None = None, anchor: str | None = None) -> None:
        """Put a piece behind the others; without a number it belongs to the part before it."""
        if number is not None:
            if anchor is not None:
                self._anchors.append(anchor)
                self._anchored.append(len(self._starts))
            self._starts.append(self._length)
            self._numbers.append(number)
        self._pieces.append(piece)
        self._length += len(piece)

    def finish(self) -> ExtractedText:
        """Return the text."""
        text = "".join(self._pieces)
        return ExtractedText(
            text, self._unit, self._starts, self._numbers, self._anchors, self._anchored
        )


def lines_of(text: str) -> ExtractedText:
    """Say of each line of a text where it begins, in eight bytes for each."""
    starts = array("q", [0])
    position = text.find("\n")
    while position >= 0:
        starts.append(position + 1)
        position = text.find("\n", position + 1)
    return ExtractedText(text, "line", starts, range(1, len(starts) + 1))
