"""Passages: long texts cut after sentences, short enough for a small model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

PASSAGE_CHARS = 800  # about 200 tokens; small models read 256
SHORTEST = 20  # characters; a shorter passage is joined to its neighbour
_BETWEEN = 2  # characters between the paragraphs of a passage
_LONG_CHARS = 1000  # a text of at most this length is not cut
_PARAGRAPH = re.compile(r"\S[\s\S]*?(?=\n[ \t]*\n|\Z)")
_HEADING = re.compile(r"#{1,6}\s+(.+)")
_UNDERLINED = re.compile(r"""(\S[^\n]*)\n([=\-~^"'#*+.:`_])\2{2,}[ \t]*(?:\n|\Z)""")
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s)|[\u3002\uff01\uff1f]")
# Characters that are about one token each; others are about a quarter of a token.
_WIDE = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff]"
)
_WIDTH = 4


class Passage(NamedTuple):
    """A passage of a text.

    Attributes:
        start, stop: Its place in the text, in characters.
        text: The text of the passage.
        heading: The heading above it.
    """

    start: int
    stop: int
    text: str
    heading: str = ""


def cut(text: str, size: int = PASSAGE_CHARS) -> Iterator[Passage]:
    """Cut a text between paragraphs into passages. A heading begins a new passage.

    Nothing is left out: a passage shorter than `SHORTEST` is joined to the next one, or at the end
    to the previous one. Time is linear in the text.

    Args:
        text: A text of any length.
        size: Characters of a passage; joined passages may have about `SHORTEST` more. A character
            of Chinese, Japanese, Korean, Thai, Lao, Khmer or Burmese counts as four.
    """
    held: Passage | None = None  # It is yielded when the next one is long enough.
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
    """Join paragraphs into passages; only the last one may be too short."""
    pieces: list[Passage] = []
    length = 0
    heading = ""
    is_code = False  # between Markdown fences, where "#" begins a comment
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
    """Cut a long paragraph after sentences, or else at spaces."""
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
    """Count the characters of a text; a wide character counts as four."""
    return len(text) if text.isascii() else len(text) + (_WIDTH - 1) * len(_WIDE.findall(text))


def _stop_of(paragraph: str, start: int, size: int) -> int:
    """Return where ``size`` letters from ``start`` on end."""
    stop = min(start + size, len(paragraph))
    while stop > start + 1 and (letters := _letters(paragraph[start:stop])) > size:
        stop = start + max(1, (stop - start) * size // letters)
    return stop


def _end_of_piece(paragraph: str, start: int, stop: int) -> int:
    """Return where the piece from ``start`` on ends, at ``stop`` or before."""
    sentences = [match.end() for match in _SENTENCE_END.finditer(paragraph, start, stop)]
    if sentences and sentences[-1] - start >= (stop - start) // 3:
        return sentences[-1]
    space = paragraph.rfind(" ", start, stop)
    return space if space > start else stop


def with_title(text: str, title: object) -> str:
    """Put a title before a text that does not begin with it. Marks of headings do not count."""
    if not isinstance(title, str) or text.lstrip("# ").startswith(title):
        return text
    return f"{title}\n{text}"


def passages_of(text: str, title: object = None) -> list[Passage]:
    """Return the passages of a long text to embed. A short text has none.

    Args:
        text: The document's text.
        title: If it is a str, it is put before passages that do not begin with it.
    """
    if _letters(text) <= _LONG_CHARS:
        return []
    found = [each._replace(text=with_title(each.text, title)) for each in cut(text)]
    return found if len(found) > 1 else []
