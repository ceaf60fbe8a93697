"""Documents from folders, files or standard input."""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

from rag_demo.documents.document import Document, checked_metadata
from rag_demo.documents.files import (
    MOST_BYTES,
    TOO_LARGE,
    Skip,
    Skipped,
    UnreadableError,
    find_files,
    full_path,
    open_file,
    read_bytes,
    to_text,
)
from rag_demo.documents.formats import read_html, read_notebook, read_pdf, with_lines
from rag_demo.documents.passages import PASSAGE_CHARS, cut
from rag_demo.errors import SourceError, short_repr

__all__ = ["STDIN", "Document", "Reading", "Skipped", "read_source"]

STDIN = "-"
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


def read_source(source: str, skipped: Skipped, reading: Reading = _DEFAULT) -> Iterator[Document]:
    """Read documents from a folder, a file or standard input.

    Time and memory are linear in the size of a file, which is at most `MOST_BYTES`. JSON lines are
    read one by one. In a folder, an unreadable file is skipped; a source that is an unreadable
    file is an error.

    Args:
        source: A folder; a file of text, Markdown, reStructuredText, Python, HTML or JSON lines,
            a notebook or a PDF; or `STDIN`, for text or JSON lines.
        skipped: Records what was skipped.
        reading: Options.

    Yields:
        The documents.

    Raises:
        SourceError: The source is missing or of an unsupported type, or a JSON line is invalid.
    """
    if source == STDIN:
        return _read_stdin(reading)
    path = Path(source)
    if not source or not path.exists():
        raise SourceError(f"'{source}' does not exist; name a folder or a file")
    if not path.is_dir():
        return _read_file(path, path.name, _refuse, reading, "")
    files = find_files(path, skipped, include=reading.include, exclude=reading.exclude)
    found = (_read_file(file, name, skipped.add, reading, f"{name}#") for file, name in files)
    return chain.from_iterable(found)


def _refuse(name: str, reason: str, detail: object = "") -> None:
    raise SourceError(f"{name}: {detail or reason}")


def _read_file(
    path: Path, name: str, skip: Skip, reading: Reading, prefix: str
) -> Iterator[Document]:
    """Read a file, and call ``skip`` for what cannot be read."""
    place, suffix = full_path(path), path.suffix.lower()
    if suffix not in _SUFFIXES and not reading.include:
        skip(name, "of an unsupported type")
        return
    # Lines of a single file belong to no file: another one with an id replaces it.
    owner = None if suffix in _LINES and not prefix else place
    try:
        with open_file(path) as file:
            found: Iterable[Document]
            if suffix in _LINES:
                found = _read_lines(file, name, skip, reading.text_field, prefix)
            elif not (found := list(_read_passages(file, name, suffix, reading))):
                skip(name, "without text")
            for document in found:
                yield document._replace(metadata={"path": place, **document.metadata}, file=owner)
    except OSError as error:
        skip(name, "unreadable", error.strerror)
    except UnreadableError as error:
        skip(name, *error.args)
    else:
        if owner is not None:
            reading.on_read(place)


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
    file: IO[bytes], name: str, skip: Skip, text_field: str = "text", prefix: str = ""
) -> Iterator[Document]:
    """Yield the documents of lines, which are read one by one.

    Args:
        file: The lines.
        name: The name of the file, for the metadata's ``source``. A line without an id has the id
            "NAME#NUMBER".
        skip: Called for a line that is not a document.
        text_field: The field with the text. ``title`` is put before the text. ``id`` or ``_id``,
            a string or a number, is the document's id. All other fields are metadata.
        prefix: The beginning of the other ids.

    Raises:
        UnreadableError: A line has more than `MOST_BYTES`.
    """
    seen: set[str] = set()
    for number, line in enumerate(iter(lambda: file.readline(MOST_BYTES + 1), b""), start=1):
        if len(line) > MOST_BYTES:
            raise UnreadableError(f"with a line {TOO_LARGE}")
        if not line.strip():
            continue
        try:
            document = _document(line, number, text_field, name, prefix)
            if document.id in seen:
                raise ValueError(f"the id {document.id!r} appears twice")
        except ValueError as error:
            skip(f"{name}:{number}", "not a document", error)
        else:
            seen.add(document.id)
            yield document


def _document(line: bytes, number: int, text_field: str, name: str, prefix: str) -> Document:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        is_object = isinstance(record, dict)
        found = f"the fields {', '.join(record)}" if is_object else type(record).__name__
        raise ValueError(
            f'expected an object with a string "{text_field}", got {short_repr(found)}; '
            "name the field with the text: --text-field"
        )
    keys = [record.pop(name, None) for name in ("id", "_id")]
    key = next((each for each in keys if each is not None), None)
    if isinstance(key, (bool, list, dict)):
        raise ValueError(f"the id must be a string or a number, got {json.dumps(key)[:50]}")
    title, text = record.get("title"), record.pop(text_field)
    record.setdefault("source", f"{name}:{number}")
    if isinstance(title, str) and title:
        text = f"{title}\n{text}"
    name = f"{name}#{number}" if key is None else f"{prefix}{key}"
    return Document(
        name, text, checked_metadata({"line": number, **record}, f"the id {short_repr(name)}")
    )


def _read_stdin(reading: Reading) -> Iterator[Document]:
    """Read JSON lines if standard input begins with "{", else one text."""
    stdin: Any = sys.stdin.buffer
    if not isinstance(stdin, io.BufferedReader):  # A stand-in; a second buffer would wait longer.
        stdin = io.BufferedReader(stdin)
    try:
        if stdin.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            yield from _read_lines(stdin, "stdin", _refuse, reading.text_field)
            return
        content = read_bytes(stdin)
        # The name depends on the content, so that another text gets another name.
        name = f"stdin-{hashlib.sha256(content).hexdigest()[:8]}"
        for document in _read_passages(io.BytesIO(content), name, ".md", reading):
            yield document._replace(file=name)
    except UnreadableError as error:
        _refuse("standard input", *error.args)
