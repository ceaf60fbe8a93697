"""The text of a page of HTML, as a reader sees it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

__all__ = ["text_of_html"]


class _VisibleText(HTMLParser):
    _HIDDEN = ("script", "style", "template", "noscript")
    _BLOCKS = ("p", "div", "li", "br", "tr", "section", "article", "pre", "title", "blockquote")

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in self._HIDDEN
        if re.fullmatch("h[1-6]", tag):
            self.pieces.append(f"\n\n{'#' * int(tag[1])} ")
        elif tag in self._BLOCKS:
            self.pieces.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in self._HIDDEN and self._hidden > 0
        if tag in self._BLOCKS or re.fullmatch("h[1-6]", tag):
            self.pieces.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.pieces.append(re.sub(r"\s+", " ", data))


def text_of_html(page: str) -> str:
    """Return what is visible, with blocks as paragraphs and headings marked as in Markdown."""
    parser = _VisibleText()
    parser.feed(page)
    parser.close()
    return "".join(parser.pieces)
