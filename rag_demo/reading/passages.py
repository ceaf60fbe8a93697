"""Passages: long texts cut by semantic-text-splitter, at the ends of paragraphs and sentences."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from rag_demo.reading.document import Document

PASSAGE_CHARS = 800  # about 200 tokens; small models read 256
LONG_CHARS = 900  # of a text that is cut although a model can read it: it is found better
SHORTEST = 20  # characters of a section, and of a passage that is cut again
_BLOCK = 1 << 14  # characters that are cut together: the splitter's time is quadratic in a line
_SPACES = re.compile(r"\s*")
_START = attrgetter("start")
_BELOW = " > "  # between the headings of a path

Lengths = Callable[[Sequence[str]], Sequence[float]]
"""Returns for each text its length divided by what the model reads."""


class Heading(NamedTuple):
    """A heading in a text: where it starts and stops, in characters, its title and its level."""

    start: int
    stop: int
    title: str
    level: int = 1


class Table(NamedTuple):
    """A table in a text: where its header and its other rows start, and where it stops."""

    start: int
    rows: int
    stop: int


class Passage(NamedTuple):
    """A passage of a text.

    Attributes:
        start, stop: Its place in the text, in characters.
        heading: The headings above it, from the outermost one: "Guide > Linux > Install".
        header: The header of the table in which it begins.
    """

    start: int
    stop: int
    heading: str = ""
    header: str = ""


def cut(
    text: str,
    size: int = PASSAGE_CHARS,
    overlap: int = 0,
    headings: Iterable[Heading] = (),
    tables: Sequence[Table] | None = None,
) -> Iterator[Passage]:
    """Cut a text into passages. Nothing but spaces is left out, and time is linear in the text.

    Args:
        text: A text of any length.
        size: Characters of a passage, at most.
        overlap: Characters that a passage shares with the one before, at most.
        headings: The headings in the order of the text. Each begins a new passage.
        tables: The tables of Markdown, in which lists, code and tables are kept together where
            they fit; None for any other text.
    """
    text = text.encode("utf-8", "replace").decode()  # The splitter refuses lone surrogates.

    def header_at(place: int) -> str:
        number = bisect_right(tables or (), place, key=lambda each: each.rows) - 1
        if number < 0 or not tables or place >= tables[number].stop:
            return ""
        header = text[tables[number].start : tables[number].rows]
        return header if len(header) <= size // 4 else ""

    for start, body, stop, heading in _sections(text, headings):
        if body - start > size // 2:
            body = start
        # A heading is not left alone: it is put before the first piece.
        begin = start if body > start else None
        low, high = (bisect_left(tables or (), place, key=_START) for place in (start, stop))
        headers = [len(header_at(each.rows)) for each in (tables or ())[low:high]]
        room = size - (body - start) - max(headers, default=0)
        while body < stop:
            end = _end_of_block(text, body, stop)
            for offset, piece in _pieces(text[body:end], room, overlap, tables is not None):
                first = body + offset
                place = first if begin is None else begin
                yield Passage(place, first + len(piece), heading, header_at(first))
                begin = None
            body = end
        if begin is not None:
            yield Passage(begin, begin + len(text[begin:stop].rstrip()), heading)


def _sections(text: str, headings: Iterable[Heading]) -> list[tuple[int, int, int, str]]:
    """Return each section's start, end of the heading, stop, and heading. Short ones are joined."""
    sections: list[tuple[int, int, int, str]] = []
    start, body, title = 0, 0, ""
    above: list[Heading] = []
    for heading in headings:
        above = [*(each for each in above if each.level < heading.level), heading]
        path = _BELOW.join(each.title for each in above)
        has_text = bool(text[body : heading.start].strip())
        if has_text and len(text[start : heading.start].strip()) >= SHORTEST:
            sections.append((start, body, heading.start, title))
            start, body, title = heading.start, heading.start, ""
        # A section that has only headings so far gets the path to the innermost one.
        if not title or (
            path.startswith(title + _BELOW) and not text[body : heading.start].strip()
        ):
            title = path
            if not text[start : heading.start].strip():
                start, body = heading.start, _SPACES.match(text, heading.stop).end()  # type: ignore[union-attr]  # it matches nothing too
    if sections and (len(text[start:].strip()) < SHORTEST or not text[body:].strip()):
        start, body, _, title = sections.pop()
    return [*sections, (start, body, len(text), title)]


def _end_of_block(text: str, start: int, stop: int) -> int:
    """Return where a block ends: after a paragraph, a line or a word if possible."""
    full = start + _BLOCK
    if full >= stop:
        return stop
    ends = (text.rfind(mark, start + _BLOCK // 2, full) for mark in ("\n\n", "\n", " "))
    return next((end + 1 for end in ends if end >= 0), full)


def _pieces(text: str, size: int, overlap: int, is_markdown: bool) -> list[tuple[int, str]]:
    """Return the pieces of a text with their offsets, which differ."""
    longest: dict[int, str] = {}
    try:
        found = _splitter(size, overlap, is_markdown).chunk_indices(text)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # Of Rust, for strange Markdown.
            raise
        found = _splitter(size, overlap, False).chunk_indices(text)
    for offset, piece in found:
        if len(piece) > len(longest.get(offset, "")):
            longest[offset] = piece
    pieces = list(longest.items())
    for number in range(len(pieces) - 1 if is_markdown and not overlap else 0):
        offset, piece = pieces[number]
        if 0 < len(piece) < SHORTEST:  # Such as the first line of a long block of code.
            stop = pieces[number + 1][0] + len(pieces[number + 1][1])
            (inner, first), *rest = _pieces(text[offset:stop], size, 0, False)
            begin = offset + (rest[0][0] if rest else stop - offset)
            if stop - begin <= size:
                pieces[number : number + 2] = [
                    (offset + inner, first),
                    (begin, text[begin:stop]),
                ]
    return [each for each in pieces if each[1]]


@lru_cache(maxsize=64)
def _splitter(size: int, overlap: int, is_markdown: bool) -> Any:
    from semantic_text_splitter import MarkdownSplitter, TextSplitter

    splitter = MarkdownSplitter if is_markdown else TextSplitter
    return splitter(size, min(overlap, size - 1))


def with_title(text: str, title: object) -> str:
    """Put a title before a text that does not begin with it. Marks of headings do not count.

    Of a path of headings, the part that the text begins with is left out.
    """
    if not isinstance(title, str):
        return text
    above, _, last = title.rpartition(_BELOW)
    if text.lstrip("# ").startswith(last):
        title = above
    return f"{title}\n{text}" if title else text


def titled(document: Document) -> str:
    """Return the text of a document with its title, which is embedded and searched."""
    return with_title(document.text, document.metadata.get("title"))


def passages_of(
    texts: Sequence[str],
    titles: Sequence[object],
    lengths: Lengths,
    size: int | None = None,
    overlap: int = 0,
) -> list[list[tuple[int, int]]]:
    """Return the passages to embed of each text: start and stop. A short text has none.

    They are cut by characters, and those that are longer than what the model reads are cut again,
    down to `SHORTEST` characters.

    Args:
        texts: The texts.
        titles: What is put before each text and each of its passages, if it is a str.
        lengths: The lengths with the titles.
        size: Characters of a passage, at most; by default `PASSAGE_CHARS`, and only texts of more
            than `LONG_CHARS`, or that the model cannot read to their end, are cut.
        overlap: Characters that passages share.
    """
    ratios = lengths([with_title(*each) for each in zip(texts, titles, strict=True)])
    most = size or PASSAGE_CHARS
    waiting = [
        (place, 0, len(text), most)
        for place, text in enumerate(texts)
        if ratios[place] > 1 or len(text) > (size or LONG_CHARS)
    ]
    found: list[list[tuple[int, int]]] = [[] for _ in texts]
    while waiting:
        spans = [
            (place, start + each.start, start + each.stop)
            for place, start, stop, most in waiting
            for each in cut(texts[place][start:stop], most, min(overlap, most // 2))
        ]
        ratios = lengths([with_title(texts[place][a:b], titles[place]) for place, a, b in spans])
        waiting = []
        for (place, a, b), ratio in zip(spans, ratios, strict=True):
            if ratio > 1 and b - a > SHORTEST:
                waiting.append((place, a, b, max(SHORTEST, int((b - a) / ratio * 0.9))))
            else:
                found[place].append((a, b))
    return [sorted(each) if len(each) > 1 else [] for each in found]
