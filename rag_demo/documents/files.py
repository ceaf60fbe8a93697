"""The files of a folder, their content, and a record of what was skipped."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

MOST_BYTES = 64 << 20  # of a file that is read as one text, and of a line of JSON
_HEAD_BYTES = 8192  # in which a binary file shows itself
_NEVER_READ = frozenset({"__pycache__", "node_modules"})

NOT_TEXT = "not UTF-8 text"
UNKNOWN_KIND = "of an unsupported type"
EXCLUDED = "excluded"
CANNOT_BE_READ = "unreadable"
NOT_REGULAR = "not a regular file"
EMPTY = "without text"
TOO_LARGE = f"of more than {MOST_BYTES >> 20} MB"
_NAMES = 10  # that are listed for a reason


class Skipped:
    """What was skipped: counts by reason, and the first names."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._names: dict[str, list[str]] = {}

    def add(self, name: str, reason: str, detail: object = "") -> None:
        """Count something that was skipped.

        Args:
            name: A file, a folder (ends with "/") or a line (ends with ":" and its number).
            reason: One of a few reasons, such as "not UTF-8 text".
            detail: The details of this case.
        """
        self._counts[reason] += 1
        names = self._names.setdefault(reason, [])
        if len(names) < _NAMES:
            names.append(f"{name}: {detail}" if detail else name)

    def __len__(self) -> int:
        return self._counts.total()

    def __str__(self) -> str:
        """Return one line with all reasons."""
        more = {True: ", ...", False: ""}
        parts = (f"{count} {reason} ({', '.join(self._names[reason])}{more[count > _NAMES]})"
                 for reason, count in sorted(self._counts.items()))  # fmt: skip
        return f"skipped {len(self)}: {'; '.join(parts)}"


class UnreadableError(Exception):
    """A file cannot be read.

    Attributes:
        reason: One of a few reasons, such as "not UTF-8 text".
        detail: The details of this case.
    """

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def find_files(
    folder: Path, skipped: Skipped, *, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Iterator[tuple[Path, str]]:
    """Yield the files of a folder and its subfolders, with their relative names.

    Hidden files, caches and installed packages are ignored. Links to folders and saved indexes
    are skipped.

    Args:
        folder: The folder.
        skipped: Records other skipped files, and those that cannot be read.
        include: Shell patterns for names or relative paths. A file must match one, if any.
        exclude: Shell patterns of files and folders to skip.
    """

    def named(path: str) -> str:
        return f"{os.path.relpath(path, folder)}/".removeprefix("./")

    def on_error(error: OSError) -> None:
        name = named(str(error.filename)) or f"{folder}/"
        skipped.add(name, CANNOT_BE_READ, error.strerror)

    for where, folders, files in os.walk(folder, onerror=on_error):
        prefix = named(where)
        if any(map(_is_database, files)):
            skipped.add(prefix or f"{folder}/", "a saved index")
            folders.clear()
            continue
        for each in (below := [each for each in sorted(folders) if _is_read(each)]).copy():
            is_excluded = _matches(prefix + each, exclude)
            # Unlike Path.is_symlink, it accepts names that are too long.
            if is_excluded or os.path.islink(f"{where}/{each}"):  # noqa: PTH114
                skipped.add(f"{prefix}{each}/", EXCLUDED if is_excluded else "a link")
                below.remove(each)
        folders[:] = below
        for each in filter(_is_read, sorted(files)):
            name = prefix + each
            if _matches(name, exclude) or (include and not _matches(name, include)):
                skipped.add(name, EXCLUDED)
            else:
                yield Path(where, each), name


def _is_database(name: str) -> bool:
    """Tell whether a file is the database of a saved index."""
    return fnmatch(name, "rag-demo-*.sqlite")


def _is_read(name: str) -> bool:
    return not name.startswith(".") and name not in _NEVER_READ


def _matches(name: str, patterns: Sequence[str]) -> bool:
    last = name.rpartition("/")[2]
    return any(fnmatch(name, pattern) or fnmatch(last, pattern) for pattern in patterns)


def full_path(path: str | Path) -> str:
    """Return the absolute path of a file, without following links."""
    return os.path.abspath(path)  # noqa: PTH100  (resolve() asks the disk about each folder)


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Never waits for a pipe.

    Raises:
        UnreadableError: The file cannot be opened or is not regular.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnreadableError(CANNOT_BE_READ, reason) from None
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise UnreadableError(NOT_REGULAR)
    return file


def read_bytes(path: Path, *, is_text: bool = True) -> bytes:
    """Read a file of at most `MOST_BYTES`.

    Args:
        path: The file.
        is_text: Whether to refuse a binary file.

    Raises:
        UnreadableError: The file is too large, is binary, or cannot be read.
    """
    with open_file(path) as file:
        try:
            head = file.read(_HEAD_BYTES)
            if is_text and b"\0" in head:
                raise UnreadableError(NOT_TEXT)
            content = head + file.read(max(0, MOST_BYTES - len(head) + 1))
        except OSError as error:
            raise UnreadableError(CANNOT_BE_READ, error.strerror) from None
    if len(content) > MOST_BYTES:
        raise UnreadableError(TOO_LARGE)
    return content


def to_text(content: bytes) -> str:
    r"""Decode a text, and turn all line ends into "\n".

    Raises:
        UnreadableError: The text is too long, is not UTF-8, or contains a null character.
    """
    if len(content) > MOST_BYTES:
        raise UnreadableError(TOO_LARGE)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableError(NOT_TEXT) from None
    if "\0" in text:
        raise UnreadableError(NOT_TEXT)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
