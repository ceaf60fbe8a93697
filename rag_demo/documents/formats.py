"""Readers of HTML, notebooks and PDF files: a text, with the position in the file of each part."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from typing import Any, NamedTuple

from rag_demo.documents.files import UnreadableError
from rag_demo.errors import required


class ExtractedText(NamedTuple):
    """A text, and the metadata of its parts: where each begins, in ascending order."""

    text: str
    places: Iterable[tuple[int, dict[str, Any]]]


def _joined(parts: Iterable[tuple[str, dict[str, Any]]]) -> ExtractedText:
    """Join pieces of text, each with the metadata of its place."""
    pieces, places = list(zip(*parts, strict=True)) or ((), ())
    starts = accumulate(map(len, pieces[:-1]), initial=0)
    return ExtractedText("".join(pieces), zip(starts, places, strict=False))  # Maybe none.


def with_lines(text: str) -> ExtractedText:
    """Return a text with the numbers of its lines."""
    starts = chain([0], (found.end() for found in re.finditer("\n", text)))
    return ExtractedText(text, ((start, {"line": n}) for n, start in enumerate(starts, 1)))


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
    return _joined(_parts(page))


def _parts(page: str) -> Iterator[tuple[str, dict[str, Any]]]:
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
    place: dict[str, Any] = {"line": 1}
    mark, preformatted = "", 0
    is_broken = is_spaced = True  # whether a paragraph, or a word, begins
    for event, element in walker:
        tag, opens = str(element.tag), event == "start"
        if opens:
            place = {**place, "line": element.sourceline or place["line"]}
            if anchor := element.get("id"):
                place["anchor"] = anchor
        if is_hidden := opens and tag in _HIDDEN:
            walker.skip_subtree()
        preformatted += (tag == "pre") * (1 if opens else -1)
        if tag not in _INLINE:
            if not is_broken:
                yield "\n\n", place
                is_broken = is_spaced = True
            mark = f"{'#' * int(tag[1])} " if opens and _HEADING.fullmatch(tag) else ""
        text = "" if is_hidden else (element.text if opens else element.tail) or ""
        if not preformatted:
            text = _SPACES.sub(" ", text)
            text = text.lstrip() if is_spaced else text
        if text:
            yield mark + text, place
            mark, is_broken, is_spaced = "", False, text[-1].isspace()


def read_notebook(content: str) -> ExtractedText:
    """Return the sources of a Jupyter notebook's cells. Positions are the numbers of cells.

    Raises:
        UnreadableError: The content is not a notebook.
    """
    try:
        cells = json.loads(content)["cells"]
        texts = ["".join(cell.get("source", "")) for cell in cells]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError("not a valid notebook", repr(error)) from None
    return _joined((f"{text}\n\n", {"cell": n}) for n, text in enumerate(texts, 1))


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
    return _joined((f"{text}\n\n", {"page": n}) for n, text in enumerate(texts, 1))
