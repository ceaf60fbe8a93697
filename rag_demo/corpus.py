"""Documents out of folders, JSON lines, or the docstrings of an installed package; streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rag_demo.documents.docstrings import (
    docstrings_of_file,
    find_package,
    is_public,
    may_register,
    module_name,
    opening_paragraph,
)
from rag_demo.documents.document import Document
from rag_demo.documents.html import text_of_html
from rag_demo.documents.passages import SHORTEST, cut
from rag_demo.errors import SourceError

__all__ = ["SUFFIXES", "Document", "Skipped", "read_source"]

SUFFIXES = (".md", ".txt", ".rst", ".py", ".html", ".htm")


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
    if not all(name.isidentifier() for name in source.split(".")):
        raise SourceError(f"{source} does not exist; name a folder, a file or a package")
    return _read_package(source, find_package(source), skipped)


def _read_folder(folder: Path, skipped: Skipped) -> Iterator[Document]:
    for path in sorted(folder.rglob("*")):
        hidden = any(name.startswith(".") for name in path.relative_to(folder).parts)
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
            for passage in cut(docstring):
                body = f"{name}: {' '.join(passage.text.split())}"
                place = f"{source}:{line}"
                yield Document(f"{place}#{passage.start}", body, {"source": place})
        if found:
            return
    if suffix in (".html", ".htm"):
        text = text_of_html(text)
    for passage in cut(text):
        metadata = {"source": source, "start": passage.start, "stop": passage.stop}
        if passage.heading:
            metadata["title"] = passage.heading
        yield Document(f"{source}#{passage.start}", passage.text, metadata)


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
