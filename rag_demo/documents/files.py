"""The files of a folder, their content, and a record of what was skipped."""

from __future__ import annotations

import codecs
import fnmatch
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

MOST_BYTES = 64 << 20  # of a file that is read as one text, and of a line of JSON
_NEVER_READ = frozenset({"__pycache__", "node_modules"})

TOO_LARGE = f"of more than {MOST_BYTES >> 20} MB"
_MARKS = [
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
]
_NAMES = 10  # that are listed for a reason
Skip = Callable[..., None]  # see `Skipped.add`


class UnreadableError(Exception):
    """A file cannot be read: one of a few reasons, such as "not UTF-8 text", and maybe details."""


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
        skipped.add(name, "unreadable", error.strerror)

    for where, folders, files in os.walk(folder, onerror=on_error):
        prefix = named(where)
        if fnmatch.filter(files, "rag-demo-*.sqlite"):
            skipped.add(prefix or f"{folder}/", "a saved index")
            folders.clear()
            continue
        for each in (below := sorted(filter(is_read, folders))).copy():
            is_excluded = matches(prefix + each, exclude)
            # Unlike Path.is_symlink, it accepts names that are too long.
            if is_excluded or os.path.islink(f"{where}/{each}"):  # noqa: PTH114
                skipped.add(f"{prefix}{each}/", "excluded" if is_excluded else "a link")
                below.remove(each)
        folders[:] = below
        for each in sorted(filter(is_read, files)):
            name = prefix + each
            if matches(name, exclude) or (include and not matches(name, include)):
                skipped.add(name, "excluded")
            else:
                yield Path(where, each), name


def is_read(name: str) -> bool:
    """Tell whether a file or folder of this name is read if it is found in a folder."""
    return not name.startswith(".") and name not in _NEVER_READ


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a relative path, or its last part, matches a shell pattern."""
    last = name.rpartition("/")[2]
    return any(
        fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(last, pattern) for pattern in patterns
    )


def full_path(path: str | Path) -> str:
    """Return the absolute path of a file, without following links."""
    return os.path.abspath(path)  # noqa: PTH100  (resolve() asks the disk about each folder)


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Never waits for a pipe.

    Raises:
        UnreadableError: The file is not regular.
        OSError: The file cannot be opened.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise UnreadableError("not a regular file")
    return path.open("rb")


def read_bytes(file: IO[bytes]) -> bytes:
    """Read a file of at most `MOST_BYTES`.

    Raises:
        UnreadableError: The file is too large.
        OSError: The file cannot be read.
    """
    content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UnreadableError(TOO_LARGE)
    return content


def to_text(content: bytes, encoding: str = "utf-8") -> str:
    r"""Decode a text, and turn all line ends into "\n". A byte order mark counts more.

    Raises:
        UnreadableError: The text has another encoding, or contains a null character.
    """
    encoding = next((name for mark, name in _MARKS if content.startswith(mark)), encoding)
    try:
        text = content.decode(encoding).removeprefix("\ufeff")
    except ValueError:
        name = "UTF-8" if encoding == "utf-8" else encoding
        raise UnreadableError(f"not {name} text") from None
    if "\0" in text:
        raise UnreadableError("with a NUL byte, so not text")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
