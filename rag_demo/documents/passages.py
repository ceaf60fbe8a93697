"""Passages: long texts cut after sentences, at most as long as a small model reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["SHORTEST", "Passage", "cut", "passages_of"]

PASSAGE_CHARS = 800  # about 200 tokens; small models read 256
SHORTEST = 20  # characters; less than that says too little to be found by itself
_BETWEEN = 2  # characters between the paragraphs of a passage
_LONG_CHARS = 1000  # what is shorter is a passage by itself
_PARAGRAPH = re.compile(r"\S[\s\S]*?(?=\n[ \t]*\n|\Z)")
_HEADING = re.compile(r"#{1,6}\s+(.+)")
_UNDERLINED = re.compile(r"""(\S[^\n]*)\n([=\-~^"'#*+.:`_])\2{2,}[ \t]*(?:\n|\Z)""")
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s)|[\u3002\uff01\uff1f]")
# Characters that are about a token each, where others are a quarter of one.
_WIDE = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff]"
)
_WIDTH = 4


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


def cut(text: str, size: int = PASSAGE_CHARS) -> Iterator[Passage]:
    """Cut a text between paragraphs into passages; a heading begins a new one.

    Nothing is left out: what is shorter than `SHORTEST` is joined to what follows it, or, at the
    end, to what stands before. Takes time that is linear in the text, and the memory of a passage.

    Args:
        text: Of any length.
        size: Characters of a passage; the joined ones may have some `SHORTEST` more. A character
            of Chinese, Japanese, Korean, Thai, Lao, Khmer or Burmese counts as four.
    """
    held: Passage | None = None  # The last one is given once what follows it is not too short.
    for passage in _gathered(text, size):
        if held is not None and len(passage.text) < SHORTEST:
            held = _joined(held, passage)
            continue
        if held is not None:
            yield held
        held = passage
    if held is not None:
        yield held


def _gathered(text: str, size: int) -> Iterator[Passage]:
    """Put paragraphs together; only the last of these passages may be too short."""
    pieces: list[Passage] = []
    length = 0
    heading = ""
    is_code = False  # between the fences of Markdown, where "#" begins a comment
    for paragraph in _PARAGRAPH.finditer(text):
        was_code, whole = is_code, paragraph.group()
        is_code ^= len(_FENCE.findall(whole)) % 2 == 1
        for offset, piece in _pieces(whole, size):
            title = None if was_code else _HEADING.match(piece) or _UNDERLINED.match(piece)
            letters = _letters(piece)
            if length >= SHORTEST and (title or length + letters > size):
                yield _joined(*pieces)
                pieces, length = [], 0
            if title:
                heading = title.group(1).strip()
            start = paragraph.start() + offset
            length += letters + (_BETWEEN if pieces else 0)
            pieces.append(Passage(start, start + len(piece), piece, heading))
    if pieces:
        yield _joined(*pieces)


def _joined(*pieces: Passage) -> Passage:
    text = "\n\n".join(piece.text for piece in pieces)
    heading = next((piece.heading for piece in pieces if piece.heading), "")
    return Passage(pieces[0].start, pieces[-1].stop, text, heading)


def _pieces(paragraph: str, size: int) -> Iterator[tuple[int, str]]:
    """Cut a paragraph that is too long for one passage: after a sentence, else at a space."""
    start = 0
    while (full := _stop_of(paragraph, start, size)) < len(paragraph):
        stop = _end_of_piece(paragraph, start, full)
        yield start, paragraph[start:stop].rstrip()
        start = stop
        while start < len(paragraph) and paragraph[start].isspace():
            start += 1  # The space itself belongs to neither piece.
    if start < len(paragraph):
        yield start, paragraph[start:].rstrip()


def _letters(text: str) -> int:
    """Count the characters of a text, the wide ones several times."""
    return len(text) if text.isascii() else len(text) + (_WIDTH - 1) * len(_WIDE.findall(text))


def _stop_of(paragraph: str, start: int, size: int) -> int:
    """Say where so many letters from ``start`` on end."""
    stop = min(start + size, len(paragraph))
    while stop > start + 1 and (letters := _letters(paragraph[start:stop])) > size:
        stop = start + max(1, (stop - start) * size // letters)
    return stop


def _end_of_piece(paragraph: str, start: int, stop: int) -> int:
    """Say where the piece from ``start`` on ends, at ``stop`` or before."""
    sentences = [match.end() for match in _SENTENCE_END.finditer(paragraph, start, stop)]
    if sentences and sentences[-1] - start >= (stop - start) // 3:
        return sentences[-1]
    space = paragraph.rfind(" ", start, stop)
    return space if space > start else stop


def passages_of(text: str, title: object = None) -> list[Passage]:
    """Cut a document that is long into passages, as they are embedded; one that is not has none.

    Args:
        text: Of the document.
        title: If it is a string, it is put before the text of passages that do not begin with it.
    """
    if _letters(text) <= _LONG_CHARS:
        return []
    named = title if isinstance(title, str) else ""
    found = []
    for passage in cut(text):
        # Whitespace between the pieces of a passage is not as it was; the text itself is.
        if not passage.text.startswith(named):
            passage = passage._replace(text=f"{named}\n{passage.text}")
        found.append(passage)
    return found if len(found) > 1 else []
