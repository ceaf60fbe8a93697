"""Documents from folders, files or standard input."""

from __future__ import annotations

import codecs
import fnmatch
import hashlib
import io
import json
import os
import stat
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
_NAMES = 10  # that are listed for a reason
Skip = Callable[..., None]  # see `Skipped.add`
_LINES = (".jsonl", ".ndjson")
_READERS = {
    **dict.fromkeys(("", ".txt", ".text", ".py", ".rst"), formats.read_text),
    **dict.fromkeys((".md", ".markdown"), formats.read_markdown),
    **dict.fromkeys((".html", ".htm", ".xhtml"), formats.read_html),
    ".ipynb": formats.read_notebook,
    ".pdf": formats.read_pdf,
}


class Skipped(dict[str, list[str]]):
    """The first names of what was skipped, by reason; an empty name for each of the others."""

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
        parts = []
        for reason, names in sorted(self.items()):
            shown = names[:_NAMES] + ["..."] * (len(names) > _NAMES)
            parts.append(f"{len(names)} {reason} ({', '.join(shown)})")
        return f"skipped {sum(map(len, self.values()))}: {'; '.join(parts)}"


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
        text_field: The field of JSON lines that has the text.
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
        return _read_file(path, path.name, _refuse, reading)
    ids: dict[str, str] = {}
    files = _find_files(path, skipped, reading)
    found = (_read_file(file, name, skipped.add, reading, ids) for file, name in files)
    return chain.from_iterable(found)


def _refuse(name: str, reason: str, detail: object = "") -> None:
    raise SourceError(f"{name}: {detail or reason}")


def _read_file(
    path: Path, name: str, skip: Skip, reading: Reading, ids: dict[str, str] | None = None
) -> Iterator[Document]:
    """Read a file, and call ``skip`` for what cannot be read.

    Args:
        path: The file.
        name: Its name in the folder.
        skip: See `Skipped.add`.
        reading: Options.
        ids: See `_read_lines`; None for a file that is itself the source.
    """
    place, suffix = full_path(path), path.suffix.lower()
    if matches(name, reading.as_text) or (suffix not in (*_READERS, *_LINES) and reading.include):
        suffix = ".txt"
    # Lines of a single file belong to no file: another one with an id replaces it.
    owner = None if suffix in _LINES and ids is None else place
    try:
        place.encode()
        if suffix not in (*_READERS, *_LINES):
            raise formats.UnreadableError("of an unsupported type")
        if not stat.S_ISREG(path.stat().st_mode):  # Opening a pipe would wait.
            raise formats.UnreadableError("not a regular file")
        with path.open("rb") as file:
            found: Iterable[Document]
            if suffix in _LINES:
                found = _read_lines(file, name, skip, reading, {} if ids is None else ids)
            elif not (found := list(_read_passages(file, name, suffix, reading))):
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


def _read_passages(file: IO[bytes], name: str, suffix: str, reading: Reading) -> Iterator[Document]:
    text, unit, starts, headings = _READERS[suffix](read_bytes(file))
    for start, stop, heading in cut(text, reading.chunk_size, reading.chunk_overlap, headings):
        metadata: dict[str, Any] = {"source": name, "start": start, "stop": stop}
        if unit:
            metadata[unit] = bisect_right(starts, start)
        if unit == "page" and (last := bisect_left(starts, stop)) > metadata[unit]:
            metadata["last_page"] = last
        if heading:
            metadata["title"] = heading
        yield Document(f"{name}#{start}", text[start:stop], metadata)


def _read_lines(
    file: IO[bytes], name: str, skip: Skip, reading: Reading, ids: dict[str, str]
) -> Iterator[Document]:
    """Yield the documents of lines, which are read one by one.

    ``title`` is put before the text. ``id`` or ``_id``, a string or a number, is the document's id;
    a line without an id has the id "NAME#NUMBER". All other fields are metadata.

    Args:
        file: The lines.
        name: The name of the file, for the metadata's ``source``.
        skip: Called for a line that is not a document.
        reading: Options.
        ids: The ids of the source, each with the name of its file. An id that an earlier file has
            gets a "~" at its end.

    Raises:
        UnreadableError: A line has more than `_MOST_BYTES`.
    """
    for number, line in enumerate(iter(lambda: file.readline(_MOST_BYTES + 1), b""), start=1):
        if len(line) > _MOST_BYTES:
            raise formats.UnreadableError(f"with a line {_TOO_LARGE}")
        line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            document = _document(line, number, reading.text_field, name)
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


def _document(line: bytes, number: int, text_field: str, name: str) -> Document:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        raise ValueError(
            f'expected an object with a string "{text_field}", got {short_repr(record)}; '
            "name the field with the text: --text-field"
        )
    keys = [record.pop(name, None) for name in ("id", "_id")]
    key = next((each for each in keys if each is not None), None)
    if isinstance(key, (bool, list, dict)):
        raise ValueError(f"the id must be a string or a number, got {json.dumps(key)[:50]}")
    title, text = record.get("title"), record.pop(text_field)
    text.encode()  # A lone surrogate is an error.
    record.setdefault("source", f"{name}:{number}")
    if isinstance(title, str) and title:
        text = f"{title}\n{text}"
    name = f"{name}#{number}" if key is None else str(key)
    metadata = checked_metadata({"line": number, **record}, f"the id {short_repr(name)}")
    return Document(name, text, metadata)


def _read_stdin(reading: Reading) -> Iterator[Document]:
    """Read JSON lines if standard input begins with "{", else one text."""
    stdin: Any = sys.stdin.buffer
    try:
        if stdin.peek(1).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            yield from _read_lines(stdin, "stdin", _refuse, reading, {})
            return
        content = read_bytes(stdin)
        # The name depends on the content, so that another text gets another name.
        name = f"stdin-{hashlib.sha256(content).hexdigest()[:8]}"
        for document in _read_passages(io.BytesIO(content), name, ".md", reading):
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


def full_path(path: str | Path) -> str:
    """Return the absolute path of a file, without following links."""
    return os.path.abspath(path)  # noqa: PTH100  (resolve() asks the disk about each folder)


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
