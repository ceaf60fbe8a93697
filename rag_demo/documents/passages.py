"""Passages: long texts cut after sentences, at most as long as a small model reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["SHORTEST", "Passage", "cut", "passages_of"]

PASSAGE_CHARS = 800  # about 200 tokens; small models read 256
SHORTEST = 20  # characters; less than that is no document but a separator
_LONG_CHARS = 1000  # what is shorter is a passage by itself
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s)")


class Passage(NamedTuple):
    """A passage of a text.

    Attributes:
        start, stop: Where it is in the text, in characters.
        text: What it says.
        heading: The one that it stands under.
    """

    start: int
    stop: int
    text: str
    heading: str = ""


def cut(text: str) -> Iterator[Passage]:
    """Cut a text between paragraphs into passages; a heading begins a new one."""
    heading, gathered, start, stop = "", "", 0, 0
    for match in re.finditer(r"\S[\s\S]*?(?=\n[ \t]*\n|\Z)", text):
        for offset, piece in _pieces(match.group()):
            title = re.match(r"#{1,6}\s+(.+)", piece)
            if gathered and (title or len(gathered) + len(piece) > PASSAGE_CHARS):
                if len(gathered) >= SHORTEST:
                    yield Passage(start, stop, gathered, heading)
                gathered = ""
            if not gathered:
                start = match.start() + offset
            if title:
                heading = title.group(1).strip()
            gathered = f"{gathered}\n\n{piece}" if gathered else piece
            stop = match.start() + offset + len(piece)
    if len(gathered) >= SHORTEST:
        yield Passage(start, stop, gathered, heading)


def _pieces(paragraph: str) -> Iterator[tuple[int, str]]:
    """Cut a paragraph that is too long for one passage: after a sentence, else at a space."""
    start = 0
    while len(paragraph) - start > PASSAGE_CHARS:
        stop = _end_of_piece(paragraph, start)
        yield start, paragraph[start:stop].rstrip()
        start = stop
        while start < len(paragraph) and paragraph[start].isspace():
            start += 1  # The space itself belongs to neither piece.
    if start < len(paragraph):
        yield start, paragraph[start:].rstrip()


def _end_of_piece(paragraph: str, start: int) -> int:
    """Say where the piece from ``start`` on ends."""
    stop = start + PASSAGE_CHARS
    sentences = [match.end() for match in _SENTENCE_END.finditer(paragraph, start, stop)]
    if sentences and sentences[-1] - start >= PASSAGE_CHARS // 3:
        return sentences[-1]
    space = paragraph.rfind(" ", start, stop)
    return space if space > start else stop


def passages_of(text: str, title: object = None) -> list[Passage]:
    """Cut a document that is long into passages, as they are embedded; one that is not has none.

    Args:
        text: Of the document.
        title: If it is a string, it is put before the text of passages that do not begin with it.
    """
    if len(text) <= _LONG_CHARS:
        return []
    named = title if isinstance(title, str) else ""
    found = []
    for passage in cut(text):
        # Whitespace between the pieces of a passage is not as it was; the text itself is.
        if not passage.text.startswith(named):
            passage = passage._replace(text=f"{named}\n{passage.text}")
        found.append(passage)
    return found if len(found) > 1 else []
