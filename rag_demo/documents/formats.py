"""Readers of HTML, notebooks and PDF files: a text, with the position in the file of each part."""

from __future__ import annotations

import io
import json
import logging
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rag_demo.documents.files import UnreadableError, to_text
from rag_demo.errors import required


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


_HIDDEN = frozenset(["script", "style", "noscript", "iframe", "noembed", "noframes", "template"])
_INLINE_NAMES = """
    a abbr b bdi bdo big cite code data del dfn em font i img ins kbd label mark q s samp small span
    strike strong sub sup time tt u var wbr
"""
_INLINE = frozenset(_INLINE_NAMES.split())
_HEADING = re.compile("h[1-6]")
_SPACES = re.compile(r"\s+")


def read_html(page: str) -> ExtractedText:
    """Return the text of a page: blocks become paragraphs, headings are marked as in Markdown.

    Positions are lines of elements, and anchors are ids of elements. Scripts, styles and templates
    are left out, and so is what is nested more than 2,000 deep; text that a style hides is
    included.
    """
    return ExtractedText.of("line", _parts(page))


def _parts(page: str) -> Iterator[tuple[str, int, str | None]]:
    with required("HTML"):
        from lxml import etree, html
    parser = html.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True
    )
    try:
        root = html.document_fromstring(page.encode("utf-8", "replace"), parser)
    except etree.ParserError:  # There is nothing but comments.
        return
    walker = etree.iterwalk(root, events=("start", "end"))
    line, anchor, mark, preformatted = 1, None, "", 0
    is_broken = is_spaced = True  # whether a paragraph, or a word, begins
    for event, element in walker:
        tag, opens = str(element.tag), event == "start"
        if opens:
            line, anchor = element.sourceline or line, element.get("id") or anchor
        if opens and tag in _HIDDEN:
            walker.skip_subtree()
        preformatted += (tag == "pre") * (1 if opens else -1)
        if tag not in _INLINE:
            if not is_broken:
                yield "\n\n", line, anchor
                is_broken = is_spaced = True
            mark = f"{'#' * int(tag[1])} " if opens and _HEADING.fullmatch(tag) else ""
        text = (element.text if opens else element.tail) or ""
        if tag in _HIDDEN and opens:
            text = ""
        if not preformatted:
            text = _SPACES.sub(" ", text)
            text = text.lstrip() if is_spaced else text
        if text:
            yield mark + text, line, anchor
            mark, is_broken, is_spaced = "", False, text[-1].isspace()


def read_notebook(content: bytes) -> ExtractedText:
    """Return the sources of a Jupyter notebook's cells. Positions are the numbers of cells.

    Raises:
        UnreadableError: The content is not a notebook.
    """
    try:
        cells = json.loads(to_text(content))["cells"]
        texts = ["".join(cell.get("source", "")) for cell in cells]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError("not a valid notebook", repr(error)) from None
    return ExtractedText.of("cell", ((f"{t}\n\n", n, None) for n, t in enumerate(texts, 1)))


def read_pdf(content: bytes) -> ExtractedText:
    """Return the text of a PDF file's pages. Positions are the numbers of pages.

    Raises:
        UnreadableError: pypdf is not installed, or the file is not a PDF, is damaged, or needs a
            password.
    """
    with required("a PDF", UnreadableError, "pdf"):
        import pypdf
    # A damaged file causes hundreds of warnings.
    logging.getLogger("pypdf").addHandler(logging.NullHandler())
    try:
        texts = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(content)).pages]
    except Exception as error:
        # A damaged file raises KeyError, AttributeError, RecursionError and others.
        raise UnreadableError("not a valid PDF", str(error) or type(error).__name__) from None
    return ExtractedText.of("page", ((f"{t}\n\n", n, None) for n, t in enumerate(texts, 1)))
