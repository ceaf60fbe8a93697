"""The text of an HTML page, in linear time.

Python's own parser takes quadratic time for tags that are not closed: half a minute for 60 KB.
Here an element that is not closed extends to the end of the page, as in a browser.
"""

from __future__ import annotations

import html
import re

from rag_demo.documents.extracted_text import ExtractedText, TextBuilder

_RAW = frozenset(
    {"script", "style", "noscript", "iframe", "noembed", "noframes", "textarea", "xmp"}
)
_VISIBLE_RAW = frozenset({"textarea", "xmp"})
_BLOCK_NAMES = """
    address article aside blockquote body br caption center dd details div dl dt fieldset
    figcaption figure footer form header hr legend li main menu nav ol option p pre section
    summary table tbody td tfoot th thead title tr ul
"""
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_MARKUP = re.compile(r"<(?=[a-zA-Z/!?])")  # Any other "<" is text, as in "a < b".
_HEADING = re.compile("h[1-6]")
_NAME = re.compile(r"/?([a-zA-Z][^\s/>]*)")
_VALUE = re.compile(r"[^\s>]*")
_KEY = re.compile(r"([^\s=/\"'<>]+)\s*\Z")
# More digits than any character has; Python refuses to convert thousands of them.
_HUGE_REFERENCE = re.compile(r"&#(?:[0-9]{8,}|[xX][0-9a-fA-F]{8,});?")
_SPACE = re.compile(r"\s+")
_SPACES = re.compile(r"\s*")
_KEY_CHARS = 64  # before an "=", where the name of an attribute is searched


def read_html(page: str) -> ExtractedText:
    """Return the text of a page: blocks become paragraphs, headings are marked as in Markdown.

    Positions are lines of the page, and anchors are ids of elements. Scripts, styles and templates
    are left out; text that a style hides is included. Never raises.
    """
    return _Page(page).read()


class _Page:
    def __init__(self, page: str) -> None:
        self._page = page
        self._text = TextBuilder("line")
        self._line, self._counted = 1, 0  # of the page, up to where lines are counted
        self._anchor: str | None = None
        self._templates = 0  # open <template> elements
        self._preformatted = 0  # open <pre> elements
        self._heading = ""  # the marks to put before the next text
        self._broken = True  # whether the current paragraph is empty
        self._spaced = True  # whether the text ends with a space

    def read(self) -> ExtractedText:
        page, position = self._page, 0
        while position < len(page):
            found = _MARKUP.search(page, position)
            opened = len(page) if found is None else found.start()
            if opened > position:
                self._add(position, opened)
            position = self._markup(opened) if opened < len(page) else opened
        return self._text.finish()

    def _markup(self, start: int) -> int:
        """Process the markup at a "<", and return where it ends."""
        page = self._page
        if page.startswith("<!--", start):
            return self._after("-->", start + 2)  # "<!-->" is a comment too.
        name = _NAME.match(page, start + 1)
        if name is None:
            return self._after(">", start + 2)
        tag, closes = name[1].lower(), page[start + 1] == "/"
        stop = self._attributes(name.end(), keep=not closes)
        if tag == "template":
            self._templates = max(0, self._templates + (-1 if closes else 1))
        elif tag == "pre":
            self._break()
            self._preformatted = max(0, self._preformatted + (-1 if closes else 1))
        elif _HEADING.fullmatch(tag):
            self._break()
            self._heading = "" if closes else f"{'#' * int(tag[1])} "
        elif tag in _BLOCKS:
            self._break()
        if tag in _RAW and not closes:
            end = re.compile(rf"</{tag}(?=[\s/>])", re.IGNORECASE).search(page, stop)
            content_stop = len(page) if end is None else end.start()
            if tag in _VISIBLE_RAW:
                self._add(stop, content_stop)
            return content_stop if end is None else self._after(">", end.end())
        return stop

    def _attributes(self, position: int, *, keep: bool) -> int:
        """Skip attributes, whose values may contain ">", and return where the tag ends."""
        page = self._page
        end = page.find(">", position)
        equals = page.find("=", position, end if end >= 0 else len(page))
        while equals >= 0:
            start = _end_of(_SPACES, page, equals + 1)
            quote = page[start : start + 1]
            if quote and quote in "\"'":
                stop = page.find(quote, start + 1)
                if stop < 0:
                    return len(page)
                value, after = (start + 1, stop), stop + 1
            else:
                after = _end_of(_VALUE, page, start)
                value = start, after
            if keep:
                self._remember(page[max(position, equals - _KEY_CHARS) : equals], value)
            if 0 <= end < after:
                end = page.find(">", after)
            position = after
            equals = page.find("=", after, end if end >= 0 else len(page))
        return len(page) if end < 0 else end + 1

    def _remember(self, before: str, value: tuple[int, int]) -> None:
        key = _KEY.search(before)
        if key is not None and key[1].lower() == "id" and value[1] - value[0] <= 256:
            self._anchor = html.unescape(_harmless(self._page[slice(*value)])) or None

    def _after(self, mark: str, position: int) -> int:
        found = self._page.find(mark, position)
        return len(self._page) if found < 0 else found + len(mark)

    def _break(self) -> None:
        if not self._broken:
            self._text.add("\n\n")
            self._broken = self._spaced = True
        self._heading = ""

    def _add(self, start: int, stop: int) -> None:
        """Append visible text, line by line."""
        if self._templates:
            return
        while start < stop:
            if self._spaced and not self._preformatted:
                start = _end_of(_SPACES, self._page, start, stop)
            end = self._page.find("\n", start, stop) + 1 or stop
            piece = html.unescape(_harmless(self._page[start:end]))
            if not self._preformatted:
                piece = _SPACE.sub(" ", piece)
            if piece:
                self._line += self._page.count("\n", self._counted, start)
                self._counted = start
                self._text.add(self._heading + piece, self._line, self._anchor)
                self._heading, self._anchor = "", None
                self._broken, self._spaced = False, piece.endswith(" ")
            start = end


def _end_of(pattern: re.Pattern[str], page: str, start: int, stop: int | None = None) -> int:
    """Return where the match of a pattern ends. The pattern must match the empty string."""
    found = pattern.match(page, start, len(page) if stop is None else stop)
    assert found is not None
    return found.end()


def _harmless(text: str) -> str:
    return _HUGE_REFERENCE.sub("\N{REPLACEMENT CHARACTER}", text) if "&#" in text else text
