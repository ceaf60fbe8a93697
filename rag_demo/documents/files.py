"""Files of a folder, one by one, and what is in them; what cannot be read is skipped, not fatal."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, NamedTuple

from rag_demo.documents.skipped import CANNOT_BE_READ, EXCLUDED, NOT_TEXT, Skipped

__all__ = [
    "MOST_BYTES",
    "FoundFile",
    "UnreadableError",
    "files_of",
    "full_path",
    "open_file",
    "read_bytes",
    "text_of",
]

MOST_BYTES = 64 << 20  # of a file that is read as one text, and of a line of JSON
_HEAD_BYTES = 8192  # in which a file that is no text shows that it is none
_NEVER_READ = frozenset({"__pycache__", "node_modules"})


class UnreadableError(Exception):
    """A file cannot be read.

    Attributes:
        reason: One of few; it fits behind "a file".
        detail: What there is to say of this one.
    """

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class FoundFile(NamedTuple):
    """A file, its name below the folder, and its bytes when it was found."""

    path: Path
    name: str
    nbytes: int


def files_of(
    folder: Path, skipped: Skipped, *, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Iterator[FoundFile]:
    """Yield the files of a folder and of those in it, by name, without a limit of depth.

    Hidden ones are passed over silently, and so are the folders of caches and of packages.
    Links to folders are not followed, saved indexes not read.

    Args:
        folder: Where to begin.
        skipped: Filled with the rest, and with what cannot be read.
        include: Patterns of the shell's kind, for names or for paths below the folder; a file
            has to match one.
        exclude: The same; what matches one is left out, a folder with all that is in it.
    """
    # Of a folder only the names are in memory, and of a million empty files that is all.
    pending = [iter([(folder, "")])]
    while pending:
        path, name = next(pending[-1], (None, ""))
        if path is None:
            pending.pop()
            continue
        try:
            kind = path.lstat().st_mode if name else path.stat().st_mode
            if stat.S_ISLNK(kind):
                kind = path.stat().st_mode
                if stat.S_ISDIR(kind):
                    skipped.add(f"{name}/", "that is a link")
                    continue
            if stat.S_ISDIR(kind):
                pending.append(_entries(path, name, skipped, exclude))
            elif not stat.S_ISREG(kind):
                skipped.add(name, "that is no regular file")
            elif _matches(name, exclude) or (include and not _matches(name, include)):
                skipped.add(name, EXCLUDED)
            else:
                yield FoundFile(path, name, path.stat().st_size)
        except OSError as error:
            skipped.add(name or f"{folder}/", CANNOT_BE_READ, error.strerror)


def _entries(
    path: Path, name: str, skipped: Skipped, exclude: Sequence[str]
) -> Iterator[tuple[Path, str]]:
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        skipped.add(f"{name or path}/", CANNOT_BE_READ, error.strerror)
        return iter(())
    if "index.sqlite" in names:
        skipped.add(f"{name or path}/", "that is a saved index")
        return iter(())
    if name and _matches(name, exclude):
        skipped.add(f"{name}/", EXCLUDED)
        return iter(())
    prefix = f"{name}/" if name else ""
    read = (one for one in names if not one.startswith(".") and one not in _NEVER_READ)
    return ((path / one, f"{prefix}{one}") for one in read)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    last = name.rpartition("/")[2]
    return any(fnmatch(name, pattern) or fnmatch(last, pattern) for pattern in patterns)


def full_path(path: str | Path) -> str:
    """Name a file so that it is the same from every folder; links are not followed."""
    return os.path.abspath(path)  # noqa: PTH100  (resolve() asks the disk about each folder)


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file; anything else that has come in its place is not waited for.

    Raises:
        UnreadableError: It cannot be opened, or is none.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnreadableError(CANNOT_BE_READ, reason) from None
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise UnreadableError("that is no regular file")
    return file


def read_bytes(path: Path, *, is_text: bool = True) -> bytes:
    """Read a file of at most `MOST_BYTES`.

    Args:
        path: Of the file.
        is_text: Stop where it begins like one that is no text.

    Raises:
        UnreadableError: It is larger, is no text, or cannot be read.
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
        raise UnreadableError(f"of more than {MOST_BYTES >> 20} MB")
    return content


def text_of(content: bytes) -> str:
    r"""Decode a text; its lines end with "\n", however they do in the file.

    Raises:
        UnreadableError: It is not UTF-8, or holds the character 0.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UnreadableError(NOT_TEXT) from None
    if "\0" in text:
        raise UnreadableError(NOT_TEXT)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
