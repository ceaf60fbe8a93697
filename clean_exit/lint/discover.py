"""Which files to read, and which of them have to be parsed."""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clean_exit.lint.findings import Note
from clean_exit.lint.source import STDIN, UnreadableError, read

_LIBRARY = re.compile(r"python3\.\d+")
_SKIPPED = {"__pycache__", "node_modules"}
SITE_WORDS = (b".__del__(", b"finalize", b"atexit")
# Patterns that begin with letters are searched for ten times as fast as others.
_CLASS = re.compile(rb"class[ \t]+([\w\x80-\xff]+)(?:\[[^\]]*\])?[ \t\\\r\n]*\(([^:]*)")
_LAST_WORD = re.compile(rb"([\w\x80-\xff]+)[ \t]*\Z")
_WORD = re.compile(rb"[\w\x80-\xff]+")


def python_files(paths: Iterable[str], exclude: Sequence[str] = ()) -> Iterator[str]:
    """Yield the files of the paths: those that were named, and ``*.py`` below folders.

    ``-`` is the standard input. Hidden folders, caches and virtual environments below a folder are
    left out.

    Raises:
        ValueError: There is no such path.
    """
    seen: set[str] = set()
    for path in paths:
        if path != STDIN and (not path or not Path(path).exists()):
            raise ValueError(f"there is no {path}" if path else "a PATH is empty")
        is_folder = path != STDIN and Path(path).is_dir()
        for file in _below(path, exclude) if is_folder else [_one(path)]:
            full = os.path.abspath(file) if file != STDIN else file  # noqa: PTH100
            if full not in seen:
                seen.add(full)
                yield file


def _one(path: str) -> str:
    """Return the path of a file, so that one whose name is ``-`` is not taken for the input."""
    short = os.path.normpath(path)
    return path if STDIN in (path, short) else short


def _below(folder: str, exclude: Sequence[str]) -> Iterator[str]:
    for place, folders, files in os.walk(os.path.normpath(folder)):
        folders[:] = sorted(
            name for name in folders
            if not name.startswith(".") and name not in _SKIPPED
            and not os.path.exists(os.path.join(place, name, "pyvenv.cfg"))  # noqa: PTH110, PTH118
            and not _is_excluded(os.path.join(place, name), exclude)  # noqa: PTH118
        )  # fmt: skip
        for name in sorted(files):
            path = os.path.normpath(os.path.join(place, name))  # noqa: PTH118
            if name.endswith(".py") and not _is_excluded(path, exclude) and _is_file(path):
                yield path


def _is_file(path: str) -> bool:
    """Whether reading does not wait, as a pipe's would; a missing file is told when it is read."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116  (hot)
    except OSError:
        return True


def _is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Whether a path, or its last part, matches one of the patterns."""
    posix = path.replace(os.sep, "/")
    wanted = [pattern.rstrip("/") for pattern in patterns]
    return any(
        fnmatch.fnmatch(name, one)
        for pattern in wanted
        for name, one in (
            (posix, pattern),
            (posix, f"*/{pattern}"),
            (posix.rpartition("/")[2], pattern),
        )
    )


@dataclass
class Survey:
    """What a look at the bytes of all files tells; parsing all would take ten times as long.

    Attributes:
        telling: The files with a word that makes parsing worth while, and their bytes.
        heirs: For each word among the bases of a class, the classes: file and name.
        streams: What was read from pipes, which can be read once only.
    """

    telling: dict[str, bytes] = field(default_factory=dict)
    heirs: dict[bytes, list[tuple[str, bytes]]] = field(default_factory=dict)
    streams: dict[str, bytes] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def read(self, path: str) -> bytes:
        """Return the bytes of a file; one that was kept is not read again."""
        kept = self.telling.get(path) or self.streams.get(path)
        return read(path) if kept is None else kept

    def files_below(self, owners: Iterable[tuple[bytes, str]]) -> set[str]:
        """Return the files of what descends, by its name, from classes of a name and a package."""
        todo = list(owners)
        seen, files = set(todo), set()
        while todo:
            base, package = todo.pop()
            for path, name in self.heirs.get(base, ()):
                if distribution(path) == package:
                    files.add(path)
                    if (name, package) not in seen:
                        seen.add((name, package))
                        todo.append((name, package))
        return files


def survey(paths: Iterable[str]) -> Survey:
    """Read all given files, and note what each may hold."""
    found = Survey()
    for path in paths:
        try:
            data = read(path)
        except UnreadableError as error:
            found.notes.append(Note(path, 0, str(error)))
            continue
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            found.notes.append(Note(path, 0, "not parsed: Python cannot read UTF-16"))
            continue
        if path == STDIN or not _is_file(path):
            found.streams[path] = data
        if b"__del__" in data or b"clean-exit-lint" in data or _registers(data):
            found.telling[path] = data
        if b"class" in data:
            classes = _CLASS.findall(data)
            renamed = _renamed(data) if classes else {}
            for name, bases in classes:
                for word in set(_WORD.findall(bases)):
                    found.heirs.setdefault(renamed.get(word, word), []).append((path, name))
    return found


def _registers(data: bytes) -> bool:
    """Whether a file has finalizers or exit callbacks."""
    at_exit = b"atexit" in data and b"register" in data
    return at_exit or (b"finalize" in data and b"weakref" in data)


def _renamed(data: bytes) -> dict[bytes, bytes]:
    """Return, for what a file imports ``as`` something else, the name that it had."""
    found = {}
    for before, after in itertools.pairwise(data.split(b" as ")):
        old, new = _LAST_WORD.search(before[-80:]), _WORD.match(after)
        if old and new:
            found[new[0]] = old[1]
    return found


def distribution(path: str) -> str:
    """Return to which installed package a file belongs; nothing for a project's own files.

    From one package into another nothing is followed: there, more depends on how it is used.
    """
    parts = path.replace(os.sep, "/").split("/")
    for at in range(len(parts) - 2, -1, -1):
        if parts[at] in {"site-packages", "dist-packages"} or _LIBRARY.fullmatch(parts[at]):
            return parts[at + 1].partition(".")[0]
    return ""
