"""Readers of text, Markdown, reStructuredText, HTML, notebooks and PDF files."""

from __future__ import annotations

import codecs
import io
import json
import logging
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from rag_demo.errors import required
from rag_demo.reading.passages import Heading, Table

_MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_FRONT_MATTER = re.compile(
    r"\A(?:---[ \t]*\n(?=(?:#.*\n)*[\w\"'][^\n]*:)[\s\S]*?^(?:---|\.\.\.)"
    r"|\+\+\+[ \t]*\n[\s\S]*?^\+\+\+)[ \t]*(?:\n|\Z)",
    re.MULTILINE,
)
_TITLE = re.compile(r"^title[ \t]*[:=][ \t]*(?![>|])(\S.*)$", re.MULTILINE)
_QUOTED = re.compile(r"([\"'])(.*)\1")
_TITLE_CHARS = 200
_MOST_MARKED = 1 << 22  # characters: each mark of Markdown takes a kilobyte of memory
_CHARSET = re.compile(rb"<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*[\"']?([\w.:-]+)", re.I)
_CONTROL = re.compile("[\0-\b\x0e-\x1f\x7f]")
_HYPHEN = re.compile(r"(?<=[^\W\d_])-\n(?=[^\W\d_])")


class UnreadableError(Exception):
    """A file cannot be read: one of a few reasons, such as "not UTF-8 text", and maybe details."""


class NotUtf8Error(UnreadableError):
    """A text is neither UTF-8 nor UTF-16."""


class ExtractedText(NamedTuple):
    """The text of a file.

    Attributes:
        text: The text.
        unit: What is counted: "line", "page" or "cell".
        starts: Where each line, page or cell begins in the text.
        headings: The headings, in the order of the text.
        tables: The tables of Markdown; None for any other text.
    """

    text: str
    unit: str = ""
    starts: Sequence[int] = ()
    headings: Iterable[Heading] = ()
    tables: Sequence[Table] | None = None


def _joined(unit: str, parts: Sequence[str]) -> ExtractedText:
    """Join pages or cells, with an empty line after each."""
    pieces = [f"{part}\n\n" for part in parts]
    return ExtractedText("".join(pieces), unit, [*accumulate(map(len, pieces), initial=0)][:-1])


def to_text(content: bytes, encoding: str = "utf-8") -> str:
    r"""Decode a text, and turn all line ends into "\n". A byte order mark counts more.

    Raises:
        UnreadableError: The text has another encoding, or contains a null character.
    """
    encoding = next((name for mark, name in _MARKS.items() if content.startswith(mark)), encoding)
    try:
        text = content.decode(encoding).removeprefix("\ufeff")
    except (ValueError, LookupError):  # A page may declare base64.
        if encoding == "utf-8":
            raise NotUtf8Error("not UTF-8 text") from None
        raise UnreadableError(f"not {encoding} text") from None
    if "\0" in text:
        raise UnreadableError("with a NUL byte, so not text")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def as_utf8(content: bytes) -> bytes | None:
    """Return Latin-1 text, as Windows writes it, as UTF-8; None if it is probably something else.

    Texts of other scripts have more letters beyond ASCII, and other files have control characters.
    UTF-8 with a damaged byte still has valid letters.
    """
    if not content.decode("utf-8", "ignore").isascii():
        return None
    try:
        text = content.decode("cp1252")
    except ValueError:
        return None
    beyond = sum(each > "\x7f" for each in text)
    return None if _CONTROL.search(text) or 3 * beyond > len(text) else text.encode()


def read_text(content: bytes) -> ExtractedText:
    """Read a plain text. Positions are lines."""
    text = to_text(content)
    starts = chain([0], (found.end() for found in re.finditer("\n", text)))
    return ExtractedText(text, "line", list(starts))


def read_markdown(content: bytes) -> ExtractedText:
    """Read Markdown. Front matter is replaced by spaces; its title is that of the beginning."""
    found = read_text(content)
    matter = _FRONT_MATTER.match(found.text)
    if matter is None:
        headings, tables = _marks(found.text)
        return found._replace(headings=headings, tables=tables)
    end, title = matter.end(), _TITLE.search(matter[0])
    text = re.sub(r"[^\n]", " ", matter[0]) + found.text[end:]
    headings, tables = _marks(text)
    if title:
        shown = title[1].rstrip()
        quoted = _QUOTED.fullmatch(shown)
        headings.insert(0, Heading(end, end, _title(quoted[2] if quoted else shown), level=0))
    return found._replace(text=text, headings=headings, tables=tables)


def _title(text: str) -> str:
    """Return a title in one line. It stands before each passage, so it must not be long."""
    return " ".join(text.split())[:_TITLE_CHARS]


@lru_cache(maxsize=1)
def _markdown_parser() -> Any:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark").enable("table")
    parser.core.ruler.enableOnly(["normalize", "block"])
    return parser


def _marks(text: str, start: int = 0) -> tuple[list[Heading], list[Table]]:
    """Return the headings and tables of Markdown that begins at a place of a text."""
    headings: list[Heading] = []
    tables: list[Table] = []
    if len(text) > _MOST_MARKED:
        return headings, tables
    lines = [start, *(start + found.end() for found in re.finditer("\n", text)), start + len(text)]
    for mark, content in pairwise(_markdown_parser().parse(text)):
        if mark.type == "heading_open" and mark.level == 0 and content.content:
            first, end = mark.map
            title, level = _title(content.content), int(mark.tag[1])  # "h2"
            headings.append(Heading(lines[first], lines[end], title, level))
        elif mark.type == "table_open":
            first, end = mark.map
            # Of the header, and of the line below it.
            tables.append(Table(lines[first], lines[first + 2], lines[end]))
    return headings, tables


# A title and a line of one character repeated below it, and maybe above it too.
_RST_HEADING = re.compile(
    r"^(?:(?P<over>([^\w\s])\2+)[ ]*\n[ ]*)?(?P<title>\S[^\n]*)\n(?P<under>([^\w\s])\5+)[ ]*$",
    re.MULTILINE,
)


def read_rst(content: bytes) -> ExtractedText:
    """Read reStructuredText. Positions are lines."""
    found, headings = read_text(content), []
    styles: list[tuple[str, bool]] = []
    for mark in _RST_HEADING.finditer(found.text):
        over, title, under = mark["over"], mark["title"].rstrip(), mark["under"]
        if len(under) < len(title) or over not in (None, under):
            continue
        style = (under[0], over is not None)
        if style not in styles:  # The first is the outermost.
            styles.append(style)
        headings.append(Heading(mark.start(), mark.end(), _title(title), 1 + styles.index(style)))
    return found._replace(headings=headings)


def read_html(content: bytes) -> ExtractedText:
    """Read the main text of a page, without navigation, as Markdown. It has no positions.

    The encoding is that of a byte order mark, the declared one, or UTF-8.

    Raises:
        UnreadableError: The page has another encoding, or is nested too deep.
    """
    with required("a page of HTML", UnreadableError, "rag"):
        import trafilatura
        from lxml import etree, html
        from trafilatura.settings import use_config

    config = use_config()
    config["DEFAULT"]["min_extracted_size"] = "1"  # It drops the headings of shorter pages.
    logging.getLogger("trafilatura").addHandler(logging.NullHandler())
    page = to_text(content, _charset(content)).encode("utf-8", "replace")
    parser = html.HTMLParser(encoding="utf-8", huge_tree=True)
    try:
        root = html.document_fromstring(page, parser)
        for element in list(root.iter(*_CONTAINERS)):
            _wrap_text(element)
        body = root.find("body")
        if len(articles := root.xpath("//article")) > 1:
            for article in articles:  # trafilatura reads only the first.
                article.tag = "div"
        if body is not None and not root.xpath("//article | //main"):
            # Without either, trafilatura leaves out headings.
            body.tag = "article"
            root.append(root.makeelement("body"))
            root[-1].append(body)
        text = trafilatura.extract(
            root,
            output_format="markdown",
            include_formatting=True,
            include_comments=False,
            favor_recall=True,
            fast=True,
            config=config,
        )
    except etree.ParserError:  # There is nothing but comments.
        text = ""
    except RecursionError:
        raise UnreadableError("nested too deep") from None
    except Exception as error:
        # A strange page raises ValueError, AttributeError and others.
        raise UnreadableError("not a valid page", str(error) or type(error).__name__) from None
    headings, tables = _marks(text or "")
    return ExtractedText(text or "", headings=headings, tables=tables)


# trafilatura leaves out text that stands directly in these, beside paragraphs.
_CONTAINERS = ("body", "div", "section", "center", "article", "main")
_IS_INLINE = re.compile(
    r"abbr|b|bd[io]|big|br|cite|code|data|del|dfn|em|font|i|ins|kbd|mark|q|s|samp|small|span|strike"
    r"|strong|su[bp]|time|tt|u|var|wbr"
).fullmatch


def _wrap_text(element: Any) -> None:
    """Put each run of text in an element, and the inline elements in it, into a paragraph."""
    run = None

    def begin(text: str | None) -> Any:
        if not any(map(str.isalnum, text or "")):  # The bars of a menu are no text.
            return None
        paragraph = element.makeelement("p")
        paragraph.text = text
        return paragraph

    children = list(element)
    if (run := begin(element.text)) is not None:
        element.text = None
        element.insert(0, run)
    for child in children:
        is_inline = isinstance(child.tag, str) and bool(_IS_INLINE(child.tag))
        if run is None and is_inline and "".join(child.itertext()).strip():
            run = element.makeelement("p")
            child.addprevious(run)
        if run is not None and (is_inline or child.tag == "a"):
            run.append(child)  # With the text after it.
        elif (run := begin(child.tail)) is not None:
            child.tail = None
            child.addnext(run)


def _charset(content: bytes) -> str:
    """Return the encoding that a page declares, as browsers understand it."""
    found = _CHARSET.search(content[:1024])
    try:
        name = codecs.lookup(found[1].decode()).name if found else "utf-8"
    except LookupError:
        return "utf-8"
    if name.startswith("utf-16"):  # The declaration could not be read if that were true.
        return "utf-8"
    return "cp1252" if name in ("iso8859-1", "ascii") else name


def read_notebook(content: bytes) -> ExtractedText:
    """Read the sources of a Jupyter notebook's cells. Headings are those of Markdown cells.

    Raises:
        UnreadableError: The content is not a notebook.
    """
    try:
        cells = json.loads(to_text(content))["cells"]
        sources = [
            "\n".join("".join(cell.get("source", "")).splitlines()).encode().decode()
            for cell in cells
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError("not a valid notebook", repr(error)) from None
    found = _joined("cell", sources)
    headings = (
        _marks(source, start)[0]
        for cell, source, start in zip(cells, sources, found.starts, strict=True)
        if cell.get("cell_type") == "markdown"
    )
    return found._replace(headings=chain.from_iterable(headings))


def read_pdf(content: bytes) -> ExtractedText:
    """Read the pages of a PDF file. Words that a line break divides are joined.

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
    return _joined("page", [_HYPHEN.sub("", text) for text in texts])
