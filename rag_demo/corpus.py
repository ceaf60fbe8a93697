"""Documents out of folders, files, standard input, or an installed package's docstrings."""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rag_demo.documents.docstrings import (
    docstrings_of_file,
    find_package,
    is_public,
    may_register,
    module_name,
    opening_paragraph,
)
from rag_demo.documents.document import Document
from rag_demo.documents.extracted_text import ExtractedText, lines_of
from rag_demo.documents.files import (
    MOST_BYTES,
    UnreadableError,
    files_of,
    full_path,
    open_file,
    read_bytes,
    text_of,
)
from rag_demo.documents.html import read_html
from rag_demo.documents.json_lines import read_json_lines
from rag_demo.documents.notebook import read_notebook
from rag_demo.documents.passages import PASSAGE_CHARS, cut
from rag_demo.documents.pdf import MissingReaderError, read_pdf
from rag_demo.documents.skipped import CANNOT_BE_READ, EMPTY, UNKNOWN_KIND, Skipped
from rag_demo.errors import SourceError

__all__ = ["STDIN", "Document", "Reading", "Skipped", "bytes_of", "is_json_lines", "read_source"]

STDIN = "-"
_TEXTS = ("", ".md", ".markdown", ".txt", ".text", ".rst")
_PAGES = (".html", ".htm", ".xhtml")
_LINES = (".jsonl", ".ndjson")
_SUFFIXES = (*_TEXTS, ".py", *_PAGES, ".ipynb", ".pdf", *_LINES)


@dataclass(frozen=True)
class Reading:
    """How a source is read.

    Attributes:
        include: Patterns that files of a folder have to match, one at least, whatever their
            suffix: what is of no known kind is read as plain text.
        exclude: Patterns of files and folders that are left out.
        chunk_size: Characters of a passage.
        text_field: Under which name an object of JSON lines has its text.
        lines_are_named: JSON lines without an id are named by their file and number, not by
            their number alone.
        on_file: Called with the bytes of each file once all of its documents were taken.
        on_read: Called with the full path of each file that could be read to its end.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    chunk_size: int = PASSAGE_CHARS
    text_field: str = "text"
    lines_are_named: bool = False
    on_file: Callable[[int], object] = lambda nbytes: None
    on_read: Callable[[str], object] = lambda path: None


_AS_USUAL = Reading()


def read_source(
    source: str,
    skipped: Skipped,
    reading: Reading = _AS_USUAL,
    *,
    stdin: io.BufferedReader | None = None,
) -> Iterator[Document]:
    """Read documents from a folder, a file, standard input, or an installed package by its name.

    Time and memory are linear in a file, of which at most `MOST_BYTES` are read; JSON lines are
    taken one by one. No text is left out for being short. A file of a folder that cannot be
    read is passed over; one that was named is an error.

    Args:
        source: A folder; a file of text, Markdown, reStructuredText, Python, HTML, a notebook
            or PDF, or of JSON objects, one a line; `STDIN`, for text or JSON lines; or a
            package's name, of which the public docstrings' opening paragraphs are read without
            importing it.
        skipped: Filled with what was passed over.
        reading: How.
        stdin: What `STDIN` stands for.

    Raises:
        SourceError: The source is missing, of an unknown kind, or a line is no document.
    """
    if source == STDIN and stdin is not None:
        return _read_stream(stdin, reading)
    if not source:
        raise SourceError("the source has no name; name a folder, a file or a package")
    path = Path(source)
    if path.is_dir():
        return _read_folder(path, skipped, reading)
    if path.is_file():
        if not _is_known(path) and not reading.include:
            known = " ".join(suffix for suffix in _SUFFIXES if suffix)
            raise SourceError(f"'{path}' is of no kind that can be read; known: {known}")
        return _read_named(path, skipped, reading)
    if path.exists():
        raise SourceError(f"'{path}' is neither a file nor a folder; pipe it to: rag-demo index -")
    if not all(name.isidentifier() for name in source.split(".")):
        raise SourceError(f"'{source}' does not exist; name a folder, a file or a package")
    return _read_package(source, find_package(source), skipped)


def bytes_of(source: str, reading: Reading, on_found: Callable[[int], object]) -> int | None:
    """Add up the bytes of all files of a source, without reading them; None if none is known.

    Args:
        source: As `read_source` takes it.
        reading: How it will be read.
        on_found: Called with 1 for each file.
    """
    path = Path(source)
    if path.is_file():
        return path.stat().st_size
    if not path.is_dir():
        return None
    total = 0
    for file in files_of(path, Skipped(), include=reading.include, exclude=reading.exclude):
        total += file.nbytes
        on_found(1)
    return total


def is_json_lines(source: str) -> bool:
    """Whether a source is a file of JSON lines, by its name."""
    return Path(source).suffix.lower() in _LINES and Path(source).is_file()


def _is_known(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES


def _read_folder(folder: Path, skipped: Skipped, reading: Reading) -> Iterator[Document]:
    for file in files_of(folder, skipped, include=reading.include, exclude=reading.exclude):
        if _is_known(file.path) or reading.include:
            try:
                yield from _read_file(file.path, file.name, skipped, reading)
            except UnreadableError as error:
                skipped.add(file.name, error.reason, error.detail)
        else:
            skipped.add(file.name, UNKNOWN_KIND)
        reading.on_file(file.nbytes)


def _read_named(path: Path, skipped: Skipped, reading: Reading) -> Iterator[Document]:
    try:
        if is_json_lines(str(path)):
            with open_file(path) as file:
                yield from _strictly(file, path.name, str(path), reading)
        else:
            yield from _read_file(path, path.name, skipped, reading)
    except UnreadableError as error:
        raise SourceError(f"'{path}' is a file {error}") from None


def _read_file(path: Path, name: str, skipped: Skipped, reading: Reading) -> Iterator[Document]:
    """Read a file of any known kind; lines of JSON that are no documents are passed over."""
    place = full_path(path)
    if path.suffix.lower() in _LINES:
        field, ids = reading.text_field, f"{name}#"
        with open_file(path) as file:
            for number, found in read_json_lines(file, text_field=field, name=name, ids=ids):
                if isinstance(found, Document):
                    yield _with(found, place, path=place, line=number)
                else:
                    skipped.add(f"{name}:{number}", "that is no document", found)
        reading.on_read(place)
        return
    is_empty = True
    for document in _documents_of(path, name, reading):
        is_empty = False
        yield _with(document, place, path=place)
    if is_empty:
        skipped.add(name, EMPTY)
    reading.on_read(place)


def _with(document: Document, file: str, **more: object) -> Document:
    """Add the file and metadata to a document; metadata that it has itself stay."""
    return document._replace(metadata={**more, **document.metadata}, file=file)


def _documents_of(path: Path, name: str, reading: Reading) -> Iterator[Document]:
    suffix = path.suffix.lower()
    content = read_bytes(path, is_text=suffix != ".pdf")
    if suffix == ".pdf":
        located = _extracted("PDF", lambda: read_pdf(content))
    elif suffix == ".ipynb":
        located = _extracted("notebook", lambda: read_notebook(text_of(content)))
    elif suffix in _PAGES:
        located = read_html(text_of(content))
    else:
        located = lines_of(text_of(content))
        if suffix == ".py":
            docstrings = list(_docstrings(located.text, path.stem, name, reading))
            if docstrings:
                yield from docstrings
                return
    yield from _passages(located, name, reading)


def _extracted(kind: str, read: Callable[[], ExtractedText]) -> ExtractedText:
    try:
        return read()
    except MissingReaderError as error:
        raise UnreadableError(CANNOT_BE_READ, error) from None
    except ValueError as error:
        raise UnreadableError(f"that is no whole {kind}", error) from None


def _passages(located: ExtractedText, source: str, reading: Reading) -> Iterator[Document]:
    for passage in cut(located.text, reading.chunk_size):
        metadata = {"source": source, "start": passage.start, "stop": passage.stop}
        metadata |= located.place(passage.start)
        if passage.heading:
            metadata["title"] = passage.heading
        yield Document(f"{source}#{passage.start}", passage.text, metadata)


def _docstrings(text: str, module: str, source: str, reading: Reading) -> Iterator[Document]:
    seen: dict[str, int] = {}
    for name, line, docstring in docstrings_of_file(text, module, public_only=False):
        place = f"{source}:{line}"
        for passage in cut(docstring, reading.chunk_size):
            body = f"{name}: {' '.join(passage.text.split())}"
            metadata = {"source": place, "title": name, "line": line}
            yield Document(_unused(f"{place}#{passage.start}", seen), body, metadata)


def _unused(name: str, seen: dict[str, int]) -> str:
    """Make a name differ from those before it: several things may stand on one line."""
    number = seen.get(name, 0) + 1
    unused = name if number == 1 else f"{name}~{number}"
    while unused in seen:
        number += 1
        unused = f"{name}~{number}"
    seen[unused] = 1
    seen[name] = number  # Where the next one begins: there may be thousands.
    return unused


def _strictly(file: IO[bytes], name: str, shown: str, reading: Reading) -> Iterator[Document]:
    """Read JSON lines of which each has to be a document."""
    unnamed = f"{name}:" if reading.lines_are_named else ""
    field = reading.text_field
    for number, found in read_json_lines(file, text_field=field, name=name, unnamed=unnamed):
        if not isinstance(found, Document):
            raise SourceError(f"{shown}:{number}: {found}")
        yield found


def _read_stream(stream: io.BufferedReader, reading: Reading) -> Iterator[Document]:
    """Read standard input: JSON lines if it begins like an object, else one text."""
    try:
        if stream.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            yield from _strictly(stream, "stdin", "standard input", reading)
            return
        content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UnreadableError(f"of more than {MOST_BYTES >> 20} MB")
        # What comes next this way is another text: the content names it.
        name = f"stdin-{hashlib.sha256(content).hexdigest()[:8]}"
        for document in _passages(lines_of(text_of(content)), name, reading):
            yield document._replace(file=name)
    except UnreadableError as error:
        raise SourceError(f"standard input is something {error}") from None


def _read_package(name: str, root: Path, skipped: Skipped) -> Iterator[Document]:
    texts: set[str] = set()
    for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        source, seen = path.relative_to(root.parent).as_posix(), dict[str, int]()
        try:
            content = text_of(read_bytes(path))
        except UnreadableError as error:
            skipped.add(source, error.reason, error.detail)
            continue
        module = module_name(path, root, name)
        if not (is_public(module) or may_register(content)):
            continue
        for title, line, docstring in docstrings_of_file(content, module):
            text = opening_paragraph(docstring)
            # The same sentence stands under many overloads: the first is enough.
            if not is_public(title) or not text or text in texts:
                continue
            texts.add(text)
            place = f"{source}:{line}"
            metadata = {"source": place, "title": title, "path": str(path), "line": line}
            yield Document(_unused(place, seen), f"{title}: {text}", metadata)
