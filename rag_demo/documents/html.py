"""The text of an HTML page, parsed by lxml."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rag_demo.documents.extracted_text import ExtractedText
from rag_demo.errors import HOW_TO_INSTALL, RagDemoError

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
    try:
        from lxml import etree, html
    except ImportError as error:
        raise RagDemoError(f"HTML needs {error.name}; {HOW_TO_INSTALL}") from None
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
