"""Documents from folders, files or standard input."""

from __future__ import annotations

import codecs
import csv
import fnmatch
import hashlib
import io
import json
import os
import re
import stat
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from rag_demo.errors import SourceError, short_repr
from rag_demo.reading import formats
from rag_demo.reading.document import Document, checked_metadata
from rag_demo.reading.passages import PASSAGE_CHARS, cut

__all__ = ["STDIN", "Document", "Reading", "Skipped", "read_source"]

STDIN = "-"
_MOST_BYTES = 64 << 20  # of a file that is read as one text, and of a line of JSON
_TOO_LARGE = f"of more than {_MOST_BYTES >> 20} MB"
_NEVER_READ = frozenset({"__pycache__", "node_modules"})
_SHOWN_CHARS = 100  # of the names of columns
_NAMES = 10  # that are listed for a reason
Skip = Callable[..., None]  # see `Skipped.add`
RECORDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,15})?")
READERS = {
    **dict.fromkeys(("", ".txt", ".text", ".py"), formats.read_text),
    ".rst": formats.read_rst,
    **dict.fromkeys((".md", ".markdown"), formats.read_markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), formats.read_html),
    ".ipynb": formats.read_notebook,
    ".pdf": formats.read_pdf,
}


class Skipped(dict[str, list[str]]):
    """The first names of what was skipped, by reason; an empty name for each of the others.

    Attributes:
        latin: The names of files that were read as Latin-1, because they are not UTF-8.
    """

    def __init__(self) -> None:
        super().__init__()
        self.latin: list[str] = []

    def __bool__(self) -> bool:
        return bool(len(self) or self.latin)

    def add(self, name: str, reason: str, detail: object = "") -> None:
        """Record something that was skipped.

        Args:
            name: A file, a folder (ends with "/") or a line (ends with ":" and its number).
            reason: One of a few reasons, such as "not UTF-8 text".
            detail: The details of this case.
        """
        full = f"{name}: {detail}" if detail else name
        names = self.setdefault(reason, [])
        names.append(full if len(names) < _NAMES else "")

    def __str__(self) -> str:
        """Return one line with all reasons."""
        parts = [f"{len(names)} {reason} ({_listed(names)})" for reason, names in self.items()]
        skipped = f"skipped {sum(map(len, self.values()))}: {'; '.join(sorted(parts))}"
        latin = f"read as Latin-1, because they are not UTF-8: {_listed(self.latin)}"
        return "; ".join([skipped] * bool(parts) + [latin] * bool(self.latin))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMES] + ["..."] * (len(names) > _NAMES))


@dataclass(frozen=True)
class Reading:
    """Options for reading a source.

    Attributes:
        include: Patterns for the files of a folder. A file must match one, if any; then files of
            an unsupported type are read as plain text.
        exclude: Patterns of files and folders to skip.
        as_text: Patterns for files of any type that are read as plain text.
        chunk_size: Characters of a passage, at most.
        chunk_overlap: Characters that a passage shares with the one before, at most.
        text_field: The field of JSON, or the column of a table, that has the text.
        on_read: Called with the full path of each file that was read to its end.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    as_text: tuple[str, ...] = ()
    chunk_size: int = PASSAGE_CHARS
    chunk_overlap: int = 0
    text_field: str = "text"
    on_read: Callable[[str], object] = lambda path: None


_DEFAULT = Reading()


def read_source(source: str, skipped: Skipped, reading: Reading = _DEFAULT) -> Iterator[Document]:
    """Read documents from a folder, a file or standard input.

    Time and memory are linear in the size of a file, which is at most `_MOST_BYTES`. JSON lines are
    read one by one. In a folder, an unreadable file is skipped; a source that is an unreadable
    file is an error. Links are followed in the name of the source, and below it only to files.

    Args:
        source: A folder; a file of text, Markdown, reStructuredText, Python, HTML, JSON lines,
            JSON or CSV, a notebook or a PDF; or `STDIN`, for text or JSON lines.
        skipped: Records what was skipped.
        reading: Options.

    Yields:
        The documents.

    Raises:
        SourceError: The source is missing or of an unsupported type, or a JSON line is invalid.
    """
    if source == STDIN:
        return _read_stdin(reading, skipped)
    path = Path(source)
    if not source or not path.exists():
        raise SourceError(f"'{source}' does not exist; name a folder or a file")
    if not path.is_dir():
        return _read_file(path, path.name, _refuse, skipped, reading)
    ids: dict[str, str] = {}
    files = _find_files(path.resolve(), skipped, reading)
    found = (_read_file(file, name, skipped.add, skipped, reading, ids) for file, name in files)
    return chain.from_iterable(found)


def _refuse(name: str, reason: str, detail: object = "") -> None:
    raise SourceError(f"{name}: {detail or reason}")


def _read_file(
    path: Path,
    name: str,
    skip: Skip,
    skipped: Skipped,
    reading: Reading,
    ids: dict[str, str] | None = None,
) -> Iterator[Document]:
    """Read a file, and call ``skip`` for what cannot be read.

    Args:
        path: The file.
        name: Its name in the folder.
        skip: See `Skipped.add`.
        skipped: Records what is read as Latin-1.
        reading: Options.
        ids: See `_read_records`; None for a file that is itself the source.
    """
    # In a folder, only the folder's own name is resolved, because that asks the disk.
    place, suffix = str(path if ids is not None else path.resolve()), path.suffix.lower()
    known = (*READERS, *RECORDS)
    if matches(name, reading.as_text) or (suffix not in known and reading.include):
        suffix = ".txt"
    # Records of a single file belong to no file: another one with an id replaces it.
    owner = None if suffix in RECORDS and ids is None else place
    try:
        place.encode()
        if suffix not in known:
            raise formats.UnreadableError("of an unsupported type")
        if not stat.S_ISREG(path.stat().st_mode):  # Opening a pipe would wait.
            raise formats.UnreadableError("not a regular file")
        with path.open("rb") as file:
            found: Iterable[Document]
            if suffix in RECORDS:
                records = _records_of(file, suffix, reading.text_field, name, skipped)
                found = _read_records(records, name, skip, reading, {} if ids is None else ids)
            elif not (found := list(_read_passages(file, name, suffix, reading, skipped))):
                skip(name, "without text")
            for document in found:
                yield document._replace(metadata={"path": place, **document.metadata}, file=owner)
    except OSError as error:
        skip(name, "unreadable", error.strerror)
    except formats.UnreadableError as error:
        skip(name, *error.args)
    except UnicodeEncodeError:
        skip(name, "with a name that is not UTF-8")
    else:
        if owner is not None:
            reading.on_read(place)


def _decoded(read: Callable[[bytes], Any], file: IO[bytes], name: str, skipped: Skipped) -> Any:
    """Return what ``read`` makes of a file; of Latin-1 made UTF-8, if it must be."""
    content = read_bytes(file)
    try:
        return read(content)
    except formats.NotUtf8Error:
        if (text := formats.as_utf8(content)) is None:
            raise
        skipped.latin.append(name)
        return read(text)


def _read_passages(
    file: IO[bytes], name: str, suffix: str, reading: Reading, skipped: Skipped
) -> Iterator[Document]:
    text, unit, starts, headings, tables = _decoded(READERS[suffix], file, name, skipped)
    size, overlap = reading.chunk_size, reading.chunk_overlap
    for start, stop, heading, header in cut(text, size, overlap, headings, tables):
        metadata: dict[str, Any] = {"source": name, "start": start, "stop": stop}
        if unit:
            metadata[unit] = bisect_right(starts, start)
        if unit == "page" and (last := bisect_left(starts, stop)) > metadata[unit]:
            metadata["last_page"] = last
        if heading:
            metadata["title"] = heading
        yield Document(f"{name}#{start}", header + text[start:stop], metadata)


Record = tuple[int, Any]
"""A record, or the ValueError that tells why it cannot be read, with the number of its line."""


def _records_of(
    file: IO[bytes], suffix: str, field: str, name: str, skipped: Skipped
) -> Iterator[Record]:
    if suffix in (".csv", ".tsv"):
        return _csv_rows(_decoded(formats.to_text, file, name, skipped), field, suffix == ".tsv")
    if suffix == ".json":
        return iter(_decoded(partial(_json_items, field=field), file, name, skipped))
    return _json_lines(file)


def _json_lines(file: IO[bytes]) -> Iterator[Record]:
    for number, line in enumerate(iter(lambda: file.readline(_MOST_BYTES + 1), b""), start=1):
        if len(line) > _MOST_BYTES:
            raise formats.UnreadableError(f"with a line {_TOO_LARGE}")
        line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            try:
                yield number, json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                yield number, ValueError(f"not JSON: {error}")


def _json_items(content: bytes, field: str) -> list[Record]:
    """Return the objects of a list in JSON; most JSON files hold something else."""
    try:
        found = json.loads(formats.to_text(content))
    except (ValueError, RecursionError) as error:
        raise formats.UnreadableError("not valid JSON", error) from None
    items = found if isinstance(found, list) else [found]
    if not any(isinstance(each, dict) and field in each for each in items):
        raise _without(field)
    return list(enumerate(items, start=1))


def _csv_rows(text: str, field: str, is_tsv: bool) -> Iterator[Record]:
    """Yield the rows of a table with a line of names. Cells that look like numbers are numbers."""
    csv.field_size_limit(max(csv.field_size_limit(), _MOST_BYTES))
    head = text.partition("\n")[0]
    delimiter = "\t" if is_tsv else max(",;\t", key=head.count)
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        if field not in (names := rows.fieldnames or ()):
            raise _without(field, f"its columns are {', '.join(names)[:_SHOWN_CHARS]}")
        line, texts = 2, (field, "id", "_id", "title")
        for row in rows:
            record: Any = {}
            if not any(row.values()):  # Excel adds such rows.
                continue
            if None in row:
                record = ValueError("more cells than columns; quote a cell that has a comma")
            else:
                for name, cell in row.items():
                    is_number = name not in texts and _NUMBER.fullmatch(cell or "")
                    if cell or name == field:
                        record[name] = json.loads(cell) if is_number else cell
            yield line, record
            line = rows.line_num + 1
    except csv.Error as error:
        raise formats.UnreadableError("not a valid table", error) from None


def _without(field: str, found: str = "") -> formats.UnreadableError:
    return formats.UnreadableError(f'without a field "{field}" (another one: --text-field)', found)


def _read_records(
    records: Iterable[Record], name: str, skip: Skip, reading: Reading, ids: dict[str, str]
) -> Iterator[Document]:
    """Yield the documents of records.

    ``title`` is put before the text. ``id`` or ``_id``, a string or a number, is the document's id;
    a record without an id has the id "NAME#NUMBER". All other fields are metadata.

    Args:
        records: The records.
        name: The name of the file, for the metadata's ``source``.
        skip: Called for a record that is not a document.
        reading: Options.
        ids: The ids of the source, each with the name of its file. An id that an earlier file has
            gets a "~" at its end.

    Raises:
        UnreadableError: The file cannot be read any further.
    """
    for number, record in records:
        try:
            document = _document(record, number, reading.text_field, name)
            unique = document.id
            while ids.get(unique, name) != name:
                unique += "~"
            if unique in ids:
                raise ValueError(f"the id {unique!r} appears twice")
        except ValueError as error:
            skip(f"{name}:{number}", "not a document", error)
        else:
            ids[unique] = name
            yield document._replace(id=unique)


def _document(record: Any, number: int, text_field: str, name: str) -> Document:
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        raise ValueError(
            f'expected an object with a string "{text_field}", got {short_repr(record)}; '
            "name the field with the text: --text-field"
        )
    text = record.pop(text_field)
    keys = [record.pop(name, None) for name in ("id", "_id")]
    key = next((each for each in keys if each is not None), None)
    if isinstance(key, (bool, list, dict)):
        raise ValueError(f"the id must be a string or a number, got {json.dumps(key)[:50]}")
    title = record.get("title")
    f"{text}{key}".encode()  # A lone surrogate is an error.
    record.setdefault("source", f"{name}:{number}")
    if isinstance(title, str) and title:
        text = f"{title}\n{text}"
    name = f"{name}#{number}" if key is None else str(key)
    metadata = checked_metadata({"line": number, **record}, f"the id {short_repr(name)}")
    return Document(name, text, metadata)


def _read_stdin(reading: Reading, skipped: Skipped) -> Iterator[Document]:
    """Read JSON lines if standard input begins with "{", else one text."""
    stdin: Any = sys.stdin.buffer
    try:
        if stdin.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            yield from _read_records(_json_lines(stdin), "stdin", _refuse, reading, {})
            return
        content = read_bytes(stdin)
        # The name depends on the content, so that another text gets another name.
        name = f"stdin-{hashlib.sha256(content).hexdigest()[:8]}"
        for document in _read_passages(io.BytesIO(content), name, ".md", reading, skipped):
            yield document._replace(file=name)
    except formats.UnreadableError as error:
        _refuse("standard input", *error.args)


def _find_files(folder: Path, skipped: Skipped, reading: Reading) -> Iterator[tuple[Path, str]]:
    """Yield the files of a folder and its subfolders, with their relative names.

    Hidden files, caches, installed packages and links to folders are ignored.

    Args:
        folder: The folder.
        skipped: Records saved indexes, and folders that cannot be read.
        reading: Which files are included and excluded.
    """

    def on_error(error: OSError) -> None:
        skipped.add(f"{error.filename}/", "unreadable", error.strerror)

    def chosen(names: Iterable[str]) -> list[str]:
        return [each for each in sorted(filter(is_read, names))
                if not matches(prefix + each, reading.exclude)]  # fmt: skip

    for where, folders, files in os.walk(folder, onerror=on_error):
        if fnmatch.filter(files, "rag-demo-*.sqlite"):
            skipped.add(f"{where}/", "a saved index")
            folders.clear()
            continue
        prefix = "" if where == str(folder) else f"{os.path.relpath(where, folder)}/"
        folders[:] = chosen(folders)
        for each in chosen(files):
            if not reading.include or matches(prefix + each, reading.include):
                yield Path(where, each), prefix + each


def is_read(name: str) -> bool:
    """Tell whether a file or folder of this name is read if it is found in a folder."""
    return not name.startswith(".") and name not in _NEVER_READ


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a relative path, or its last part, matches a shell pattern."""
    names = name, name.rpartition("/")[2]
    return any(fnmatch.fnmatch(each, pattern) for each in names for pattern in patterns)


def read_bytes(file: IO[bytes]) -> bytes:
    """Read a file of at most `_MOST_BYTES`.

    Raises:
        UnreadableError: The file is too large.
        OSError: The file cannot be read.
    """
    content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise formats.UnreadableError(_TOO_LARGE)
    return content
