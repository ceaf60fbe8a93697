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

_SKIPPED = {"__pycache__", "node_modules"}
_TELLING = (b"__del__", b"clean-exit-lint")
SITES = (b".__del__(", b"finalize", b"atexit")
# Patterns that begin with letters are searched for ten times as fast as others.
_CLASS = re.compile(rb"class[ \t]+([\w\x80-\xff]+)[^(:\n]*\(([^)]*)\)")
_DEFINED = re.compile(rb"class[ \t]+([\w\x80-\xff]+)")
_FROM = re.compile(rb"from[ \t]+([.\w]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)")
_LAST_WORD = re.compile(rb"([\w\x80-\xff]+)[ \t]*\Z")
_WORD = re.compile(rb"[\w\x80-\xff]+")


def python_files(paths: Iterable[str], exclude: Sequence[str] = ()) -> Iterator[str]:
    """Yield the files of the paths: those that were named, and ``*.py`` below folders.

    ``-`` is the standard input.

    Hidden folders, caches and virtual environments below a folder are left out.

    Raises:
        ValueError: There is no such path.
    """
    seen = set()
    for path in paths:
        if path != STDIN and (not path or not Path(path).exists()):
            raise ValueError(f"there is no {path}" if path else "a PATH is empty")
        is_folder = path != STDIN and Path(path).is_dir()
        for file in _below(path, exclude) if is_folder else [_one(path)]:
            if file not in seen:
                seen.add(file)
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
    """Whether reading does not wait, as a pipe's would; what is not there is told by reading."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116  (hot)
    except OSError:
        return True


def _is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Whether a path, or its last part, matches one of the patterns."""
    posix = path.replace(os.sep, "/")
    return any(
        fnmatch.fnmatch(posix, pattern.rstrip("/"))
        or fnmatch.fnmatch(posix, f"*/{pattern.rstrip('/')}")
        or fnmatch.fnmatch(posix.rpartition("/")[2], pattern.rstrip("/"))
        for pattern in patterns
    )


@dataclass
class Survey:
    """What a look at the bytes of all files tells.

    Attributes:
        telling: The files with a word that a rule is about, and their bytes.
        heirs: For a class's name, the classes that name it as a base: file, name, and whether the
            file defines a class of the base's name itself.
        streams: What was read from pipes, which can be read once only.
    """

    telling: dict[str, bytes] = field(default_factory=dict)
    heirs: dict[bytes, list[tuple[str, bytes, bool]]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    streams: dict[str, bytes] = field(default_factory=dict)
    _sources: dict[str, list[tuple[bytes, set[bytes]]]] = field(default_factory=dict)
    dotted: dict[str, bytes] = field(default_factory=dict)

    def read(self, path: str) -> bytes:
        """Return the bytes of a file; one that was kept is not read again."""
        kept = self.telling.get(path) or self.streams.get(path)
        return read(path) if kept is None else kept

    def below(self, owners: Iterable[tuple[bytes, str]]) -> set[str]:
        """Return the files of all classes that seem to descend from classes, by name and file."""
        todo = list(owners)
        seen, files = set(todo), {path for _, path in todo}
        while todo:
            word, origin = todo.pop()
            for path, name, is_local in self.heirs.get(word, ()):
                if path != origin and (is_local or not self._imports(path, word, origin)):
                    continue  # Another class of that name.
                files.add(path)
                if (name, path) not in seen:
                    seen.add((name, path))
                    todo.append((name, path))
        return files

    def _imports(self, path: str, word: bytes, origin: str) -> bool:
        """Whether a file takes a name, or everything, from a module or package of another file."""
        if path not in self._sources:
            found: list[tuple[bytes, set[bytes]]] = []
            for module, names in _FROM.findall(self.read(path)):
                found.append((module, set(_WORD.findall(names)) or {b"*"}))
            self._sources[path] = found
        parts = set(os.fsencode(os.path.splitext(origin)[0]).split(os.sep.encode()))  # noqa: PTH122
        for module, names in self._sources[path]:
            last = module.rpartition(b".")[2]
            if (word in names or b"*" in names) and (not last or last in parts):
                return True
        return b"." + word in self.dotted.get(path, b"")


def survey(paths: Iterable[str]) -> Survey:
    """Look at the bytes of files; parsing all of them would take ten times as long."""
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
        if any(word in data for word in _TELLING) or _registers(data):
            found.telling[path] = data
        if b"class" not in data:
            continue
        bases = [(match[1], match[2]) for match in _CLASS.finditer(data) if match[2].strip()]
        renamed = _renamed(data) if bases else {}
        own = set(_DEFINED.findall(data)) if bases else set()
        dotted = b" ".join(said for _, said in bases if b"." in said)
        if dotted:
            found.dotted[path] = dotted
        for name, said in bases:
            for word in set(_WORD.findall(said)):
                heir = (path, name, word in own)
                found.heirs.setdefault(renamed.get(word, word), []).append(heir)
    return found


def _registers(data: bytes) -> bool:
    """Whether a file has finalizers or exit callbacks."""
    at_exit = b"atexit" in data and b"register" in data
    return at_exit or (b"finalize" in data and b"weakref" in data)


def _renamed(data: bytes) -> dict[bytes, bytes]:
    """Return, for what a file imports ``as`` something else, the name that it had."""
    parts = data.split(b" as ")
    found = {}
    for before, after in itertools.pairwise(parts):
        old, new = _LAST_WORD.search(before[-80:]), _WORD.match(after)
        if old and new:
            found[new[0]] = old[1]
    return found
