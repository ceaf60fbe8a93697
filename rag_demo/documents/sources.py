"""Documents from folders, files or standard input."""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from rag_demo.documents.document import Document
from rag_demo.documents.files import (
    Skipped,
    UnreadableError,
    find_files,
    full_path,
    open_file,
    read_bytes,
    to_text,
)
from rag_demo.documents.formats import read_html, read_notebook, read_pdf, with_lines
from rag_demo.documents.json_lines import read_json_lines
from rag_demo.documents.passages import PASSAGE_CHARS, cut
from rag_demo.errors import SourceError

__all__ = ["STDIN", "Document", "Reading", "Skipped", "read_source"]

STDIN = "-"
_Skip = Callable[..., None]  # see `Skipped.add`
_WITH_HEADINGS = (".md", ".markdown", ".rst", ".html", ".htm", ".xhtml", ".ipynb")
_LINES = (".jsonl", ".ndjson")
_SUFFIXES = ("", ".txt", ".text", ".py", ".pdf", *_WITH_HEADINGS, *_LINES)
_READERS = {**dict.fromkeys([".html", ".htm", ".xhtml"], read_html), ".ipynb": read_notebook}


@dataclass(frozen=True)
class Reading:
    """Options for reading a source.

    Attributes:
        include: Patterns for the files of a folder. A file must match one, if any; then files of
            an unsupported type are read as plain text.
        exclude: Patterns of files and folders to skip.
        chunk_size: Characters of a passage, at most.
        chunk_overlap: Characters that a passage shares with the one before, at most.
        text_field: The field of JSON lines that has the text.
        on_read: Called with the full path of each file that was read to its end.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    chunk_size: int = PASSAGE_CHARS
    chunk_overlap: int = 0
    text_field: str = "text"
    on_read: Callable[[str], object] = lambda path: None


_DEFAULT = Reading()


def read_source(
    source: str,
    skipped: Skipped,
    reading: Reading = _DEFAULT,
    *,
    stdin: io.BufferedReader | None = None,
) -> Iterator[Document]:
    """Read documents from a folder, a file or standard input.

    Time and memory are linear in the size of a file, which is at most `MOST_BYTES`. JSON lines are
    read one by one. In a folder, an unreadable file is skipped; a source that is an unreadable
    file is an error.

    Args:
        source: A folder; a file of text, Markdown, reStructuredText, Python, HTML or JSON lines,
            a notebook or a PDF; or `STDIN`, for text or JSON lines.
        skipped: Records what was skipped.
        reading: Options.
        stdin: The stream for `STDIN`.

    Yields:
        The documents.

    Raises:
        SourceError: The source is missing or of an unsupported type, or a JSON line is invalid.
    """
    if source == STDIN and stdin is not None:
        return _read_stream(stdin, reading)
    path = Path(source)
    if not source or not path.exists():
        raise SourceError(f"'{source}' does not exist; name a folder or a file")
    if path.is_dir():
        files = find_files(path, skipped, include=reading.include, exclude=reading.exclude)
        found = (_read_file(file, name, skipped.add, reading, f"{name}#") for file, name in files)
        return chain.from_iterable(found)
    if not path.is_file():
        raise SourceError(f"'{path}' is not a file or folder; pipe it to: rag-demo index -")
    if path.suffix.lower() not in _SUFFIXES and not reading.include:
        known = " ".join(suffix for suffix in _SUFFIXES if suffix)
        raise SourceError(f"'{path}' has an unsupported file type; supported: {known}")
    return _read_file(path, path.name, _refuse, reading, "")


def _refuse(name: str, reason: str, detail: object = "") -> None:
    raise SourceError(f"{name}: {detail or reason}")


def _read_file(
    path: Path, name: str, skip: _Skip, reading: Reading, prefix: str
) -> Iterator[Document]:
    """Read a file, and call ``skip`` for what cannot be read."""
    place, suffix = full_path(path), path.suffix.lower()
    if suffix not in _SUFFIXES and not reading.include:
        skip(name, "of an unsupported type")
        return
    try:
        with open_file(path) as file:
            if suffix in _LINES:
                # Lines of a single file belong to no file: another one with an id replaces it.
                owner = place if prefix else None
                for document in _read_lines(file, name, skip, reading, prefix):
                    yield _with_path(document, place)._replace(file=owner)
            else:
                found = list(_read_passages(file, name, suffix, reading))
                for document in found:
                    yield _with_path(document, place)._replace(file=place)
                if not found:
                    skip(name, "without text")
    except OSError as error:
        skip(name, "unreadable", error.strerror)
    except UnreadableError as error:
        skip(name, *error.args)
    else:
        if prefix or suffix not in _LINES:
            reading.on_read(place)


def _with_path(document: Document, path: str) -> Document:
    return document._replace(metadata={"path": path, **document.metadata})


def _read_passages(file: IO[bytes], name: str, suffix: str, reading: Reading) -> Iterator[Document]:
    content = read_bytes(file)
    if suffix == ".pdf":
        text, places = read_pdf(content)
    else:
        text, places = _READERS.get(suffix, with_lines)(to_text(content))
    remaining = iter(places)
    place: dict[str, Any] = {}
    following = next(remaining, None)
    size, overlap = reading.chunk_size, reading.chunk_overlap
    for start, stop, heading in cut(text, size, overlap, has_headings=suffix in _WITH_HEADINGS):
        while following is not None and following[0] <= start:
            place, following = following[1], next(remaining, None)
        title = {"title": heading} if heading else {}
        metadata = {"source": name, "start": start, "stop": stop, **place, **title}
        yield Document(f"{name}#{start}", text[start:stop], metadata)


def _read_lines(
    file: IO[bytes], name: str, skip: _Skip, reading: Reading, prefix: str = ""
) -> Iterator[Document]:
    lines = read_json_lines(file, text_field=reading.text_field, name=name, prefix=prefix)
    for number, found in lines:
        if isinstance(found, Document):
            yield found._replace(metadata={"line": number, **found.metadata})
        else:
            skip(f"{name}:{number}", "not a document", found)


def _read_stream(stream: io.BufferedReader, reading: Reading) -> Iterator[Document]:
    """Read JSON lines if the stream begins with "{", else one text."""
    try:
        if stream.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            yield from _read_lines(stream, "stdin", _refuse, reading)
            return
        content = read_bytes(stream)
        # The name depends on the content, so that another text gets another name.
        name = f"stdin-{hashlib.sha256(content).hexdigest()[:8]}"
        for document in _read_passages(io.BytesIO(content), name, ".md", reading):
            yield document._replace(file=name)
    except UnreadableError as error:
        _refuse("standard input", *error.args)
