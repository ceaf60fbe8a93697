"""Documents from folders, files or standard input."""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rag_demo.documents.document import Document
from rag_demo.documents.files import (
    CANNOT_BE_READ,
    EMPTY,
    MOST_BYTES,
    UNKNOWN_KIND,
    Skipped,
    UnreadableError,
    find_files,
    full_path,
    open_file,
    read_bytes,
    to_text,
)
from rag_demo.documents.formats import (
    ExtractedText,
    read_html,
    read_notebook,
    read_pdf,
    with_lines,
)
from rag_demo.documents.json_lines import read_json_lines
from rag_demo.documents.passages import PASSAGE_CHARS, cut
from rag_demo.errors import SourceError

__all__ = ["STDIN", "Document", "Reading", "Skipped", "read_source"]

STDIN = "-"
_MARKED = (".md", ".markdown", ".rst")
_TEXTS = ("", ".txt", ".text")
_PAGES = (".html", ".htm", ".xhtml")
_LINES = (".jsonl", ".ndjson")
_READERS = {".ipynb": read_notebook, ".pdf": read_pdf}
_SUFFIXES = (*_MARKED, *_TEXTS, ".py", *_PAGES, *_READERS, *_LINES)


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
        lines_are_named: Whether the ids of JSON lines without an id include the file's name.
        on_read: Called with the full path of each file that was read to its end.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    chunk_size: int = PASSAGE_CHARS
    chunk_overlap: int = 0
    text_field: str = "text"
    lines_are_named: bool = False
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
    if not source:
        raise SourceError("the source is empty; name a folder or a file")
    path = Path(source)
    if path.is_dir():
        files = find_files(path, skipped, include=reading.include, exclude=reading.exclude)
        return _read_files(files, skipped, reading, is_folder=True)
    if path.is_file():
        if path.suffix.lower() not in _SUFFIXES and not reading.include:
            known = " ".join(suffix for suffix in _SUFFIXES if suffix)
            raise SourceError(f"'{path}' has an unsupported file type; supported: {known}")
        return _read_files([(path, path.name)], skipped, reading, is_folder=False)
    if path.exists():
        raise SourceError(f"'{path}' is neither a file nor a folder; pipe it to: rag-demo index -")
    raise SourceError(f"'{source}' does not exist; name a folder or a file")


def _read_files(
    files: Iterable[tuple[Path, str]], skipped: Skipped, reading: Reading, *, is_folder: bool
) -> Iterator[Document]:
    """Read files. What cannot be read is skipped in a folder, and else an error."""
    for path, name in files:
        place, suffix = full_path(path), path.suffix.lower()
        if suffix not in _SUFFIXES and not reading.include:
            skipped.add(name, UNKNOWN_KIND)
            continue
        try:
            if suffix in _LINES:
                with open_file(path) as file:
                    only = skipped if is_folder else None
                    label = name if is_folder else str(path)
                    yield from _read_lines(file, name, label, reading, path=place, skipped=only)
            else:
                found = [_with(each, place, path=place) for each in _documents(path, name, reading)]
                yield from found
                if not found:
                    skipped.add(name, EMPTY)
        except (UnreadableError, OSError) as error:
            if not is_folder:
                raise SourceError(f"'{path}' cannot be indexed: {error}") from None
            reason, detail = CANNOT_BE_READ, getattr(error, "strerror", "")
            if isinstance(error, UnreadableError):
                reason, detail = error.reason, error.detail
            skipped.add(name, reason, detail)
            continue
        if is_folder or suffix not in _LINES:
            reading.on_read(place)


def _with(document: Document, file: str | None, **more: object) -> Document:
    """Set a document's file, and add metadata without replacing its own."""
    return document._replace(metadata={**more, **document.metadata}, file=file)


def _documents(path: Path, name: str, reading: Reading) -> Iterator[Document]:
    suffix = path.suffix.lower()
    content = read_bytes(path, is_text=suffix != ".pdf")
    if suffix in _READERS:
        extracted = _READERS[suffix](content)
    else:
        read = read_html if suffix in _PAGES else with_lines
        extracted = read(to_text(content))
    has_headings = suffix in (*_MARKED, *_PAGES, ".ipynb")
    yield from _passages(extracted, name, reading, has_headings=has_headings)


def _passages(
    extracted: ExtractedText, source: str, reading: Reading, *, has_headings: bool
) -> Iterator[Document]:
    text, size, overlap = extracted.text, reading.chunk_size, reading.chunk_overlap
    for passage in cut(text, size, overlap, has_headings=has_headings):
        start, stop = passage.start, passage.stop
        metadata = {"source": source, "start": start, "stop": stop, **extracted.place(start)}
        if passage.heading:
            metadata["title"] = passage.heading
        yield Document(f"{source}#{start}", text[start:stop], metadata)


def _read_lines(
    file: IO[bytes],
    name: str,
    label: str,
    reading: Reading,
    *,
    path: str | None = None,
    skipped: Skipped | None = None,
) -> Iterator[Document]:
    """Read JSON lines. A bad line is an error, or in a file of a folder skipped."""
    ids = "" if skipped is None else f"{name}#"
    unnamed = f"{name}:" if reading.lines_are_named and not ids else ""
    field = reading.text_field
    lines = read_json_lines(file, text_field=field, name=name, ids=ids, unnamed=unnamed)
    for number, found in lines:
        if isinstance(found, Document):
            of_file = path if ids else None
            yield found if path is None else _with(found, of_file, path=path, line=number)
        elif skipped is None:
            raise SourceError(f"{label}:{number}: {found}")
        else:
            skipped.add(f"{label}:{number}", "not a document", found)


def _read_stream(stream: io.BufferedReader, reading: Reading) -> Iterator[Document]:
    """Read JSON lines if the stream begins with "{", else one text."""
    try:
        if stream.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            yield from _read_lines(stream, "stdin", "standard input", reading)
            return
        content = stream.read(MOST_BYTES + 1)
        # The name depends on the content, so that another text gets another name.
        name = f"stdin-{hashlib.sha256(content).hexdigest()[:8]}"
        text = with_lines(to_text(content))
        for document in _passages(text, name, reading, has_headings=True):
            yield document._replace(file=name)
    except UnreadableError as error:
        raise SourceError(f"standard input cannot be indexed: {error}") from None
