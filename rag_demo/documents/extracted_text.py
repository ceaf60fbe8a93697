"""A text that was extracted from a file, with the position in the file of each part."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class ExtractedText:
    """A text and the positions of its parts.

    Attributes:
        text: The text.
        unit: The unit of positions: "line", "cell" or "page"; the first one is 1.
        starts: Where parts begin in the text, in ascending order.
        numbers: The position of each part in the file.
        anchors: The ids that a link can refer to.
        anchored: The number of the part after each anchor, in ascending order.
    """

    text: str
    unit: str
    starts: array[int]
    numbers: Sequence[int]
    anchors: list[str] = field(default_factory=list)
    anchored: array[int] = field(default_factory=lambda: array("q"))

    def place(self, offset: int) -> dict[str, int | str]:
        """Return the position of an offset in the text as metadata, with the anchor before it."""
        part = bisect_right(self.starts, offset) - 1
        if part < 0:
            return {}
        found: dict[str, int | str] = {self.unit: self.numbers[part]}
        anchor = bisect_right(self.anchored, part) - 1
        if anchor >= 0:
            found["anchor"] = self.anchors[anchor]
        return found


class TextBuilder:
    """Builds an `ExtractedText`.

    Args:
        unit: See `ExtractedText`.
    """

    def __init__(self, unit: str) -> None:
        self._pieces: list[str] = []
        self._length = 0
        self._numbers = array("q")
        self._text = ExtractedText("", unit, array("q"), self._numbers)

    def add(self, piece: str, number: int | None = None, anchor: str | None = None) -> None:
        """Append a piece of text.

        Args:
            piece: The text.
            number: Its position in the file; None continues the part before.
            anchor: The id before it.
        """
        if number is not None:
            if anchor is not None:
                self._text.anchors.append(anchor)
                self._text.anchored.append(len(self._text.starts))
            self._text.starts.append(self._length)
            self._numbers.append(number)
        self._pieces.append(piece)
        self._length += len(piece)

    def finish(self) -> ExtractedText:
        """Return the text."""
        return replace(self._text, text="".join(self._pieces))


def with_lines(text: str) -> ExtractedText:
    """Return a text with the positions of its lines. Takes eight bytes for each line."""
    starts = array("q", [0])
    position = text.find("\n")
    while position >= 0:
        starts.append(position + 1)
        position = text.find("\n", position + 1)
    return ExtractedText(text, "line", starts, range(1, len(starts) + 1))
