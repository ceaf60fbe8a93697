"""Documents out of folders, JSON lines, or the docstrings of an installed package; streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from rag_demo.documents.docstrings import (
    docstrings_of_file,
    find_package,
    is_public,
    may_register,
    module_name,
    opening_paragraph,
)
from rag_demo.documents.passages import SHORTEST, chunks
from rag_demo.errors import SourceError

__all__ = ["SUFFIXES", "Document", "Skipped", "read_source"]

SUFFIXES = (".md", ".txt", ".rst", ".py", ".html", ".htm")


@dataclass(frozen=True)
class Document:
    """One text to index, and where it is from."""

    id: str
    text: str
    metadata: dict[str, Any]


@dataclass
class Skipped:
    """The files that were passed over, and why."""

    undecodable: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = ", ".join(self.undecodable[:3]) + (", ..." if len(self.undecodable) > 3 else "")
        count = len(self.undecodable)
        files = "1 file that is" if count == 1 else f"{count} files that are"
        return f"skipped {files} not UTF-8 text: {names}"


def read_source(source: str, skipped: Skipped) -> Iterator[Document]:
    """Read documents from a folder, a file, or an installed package by its name.

    Args:
        source: A folder with files of `SUFFIXES`; one such file; a ``.jsonl`` file of objects
            with ``text`` and optionally ``id``, ``title`` and more; or a package's name, of
            which the public docstrings' opening paragraphs are read without importing it.
        skipped: Filled with what was passed over.

    Raises:
        SourceError: The source is missing, of an unknown kind, or a line is no document.
    """
    path = Path(source)
    if path.is_dir():
        return _read_folder(path, skipped)
    if path.is_file():
        if path.suffix in (".jsonl", ".ndjson"):
            return _read_jsonl(path)
        if path.suffix.lower() not in SUFFIXES:
            raise SourceError(
                f"{path} is of no kind that can be read; known: .jsonl {' '.join(SUFFIXES)}"
            )
        return _read_file(path, path.name, skipped)
    if not all(part.isidentifier() for part in source.split(".")):
        raise SourceError(f"{source} does not exist; name a folder, a file or a package")
    return _read_package(source, find_package(source), skipped)


def _read_folder(folder: Path, skipped: Skipped) -> Iterator[Document]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in SUFFIXES and path.is_file() and not hidden:
            yield from _read_file(path, path.relative_to(folder).as_posix(), skipped)


def _read_file(path: Path, source: str, skipped: Skipped) -> Iterator[Document]:
    text = _decode(path, source, skipped)
    if text is None:
        return
    suffix = path.suffix.lower()
    if suffix == ".py":
        found = list(docstrings_of_file(text, path.stem, public_only=False))
        for name, line, docstring in found:
            for part in chunks(docstring):
                body = f"{name}: {' '.join(part.text.split())}"
                yield Document(
                    f"{source}:{line}#{part.start}", body, {"source": f"{source}:{line}"}
                )
        if found:
            return
    if suffix in (".html", ".htm"):
        text = _text_of_html(text)
    for part in chunks(text):
        metadata = {"source": source, "start": part.start, "stop": part.stop}
        if part.heading:
            metadata["title"] = part.heading
        yield Document(f"{source}#{part.start}", part.text, metadata)


def _decode(path: Path, source: str, skipped: Skipped) -> str | None:
    try:
        content = path.read_bytes()
        if b"\0" not in content:
            return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    skipped.undecodable.append(source)
    return None


def _read_jsonl(path: Path) -> Iterator[Document]:
    seen: set[str] = set()
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    document = _document_of_line(line, number, path)
                    if document.id in seen:
                        raise SourceError(f"{path}:{number}: the id {document.id!r} stands twice")
                    seen.add(document.id)
                    yield document
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 text: {error.reason}") from None
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error


def _document_of_line(line: str, number: int, path: Path) -> Document:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise SourceError(f'{path}:{number}: expected an object with a string "text"')
    name = record.pop("id", record.pop("_id", number))
    title, text = record.get("title"), record.pop("text")
    record.setdefault("source", f"{path.name}:{number}")
    if isinstance(title, str) and title:
        text = f"{title}\n{text}"
    return Document(str(name), text, record)


def _read_package(name: str, root: Path, skipped: Skipped) -> Iterator[Document]:
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        source = _decode(path, path.relative_to(root.parent).as_posix(), skipped)
        module = module_name(path, root, name)
        if source is None or not (is_public(module) or may_register(source)):
            continue
        for title, line, docstring in docstrings_of_file(source, module):
            text = opening_paragraph(docstring)
            # The same sentence stands under many overloads: the first is enough.
            if not is_public(title) or len(text) < SHORTEST or text in seen:
                continue
            seen.add(text)
            place = f"{path.relative_to(root.parent).as_posix()}:{line}"
            yield Document(place, f"{title}: {text}", {"source": place, "title": title})


class _HtmlText(HTMLParser):
    """Collects what a reader of a page sees."""

    _HIDDEN = ("script", "style", "template", "noscript")
    _BLOCKS = ("p", "div", "li", "br", "tr", "section", "article", "pre", "title", "blockquote")

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in self._HIDDEN
        if re.fullmatch("h[1-6]", tag):
            self.parts.append(f"\n\n{'#' * int(tag[1])} ")
        elif tag in self._BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in self._HIDDEN and self._hidden > 0
        if tag in self._BLOCKS or re.fullmatch("h[1-6]", tag):
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.parts.append(re.sub(r"\s+", " ", data))


def _text_of_html(page: str) -> str:
    parser = _HtmlText()
    parser.feed(page)
    parser.close()
    return "".join(parser.parts)
