"""The files to check: finding them, reading them, and choosing which ones to parse."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_SKIPPED = {"__pycache__", "node_modules"}


def python_files(paths: Iterable[str], exclude: Sequence[str] = ()) -> Iterator[str]:
    """Yield each file of the paths once: the named files, and ``*.py`` below the named folders.

    Below a folder, hidden folders, caches and virtual environments are skipped.

    Args:
        paths: Files and folders.
        exclude: Glob patterns for files and folders below the named folders.

    Raises:
        ValueError: A path does not exist.
    """
    seen: set[str] = set()
    for path in paths:
        if not path or not Path(path).exists():
            raise ValueError(f"{path} does not exist" if path else "PATH must not be empty")
        is_folder = Path(path).is_dir()
        for file in _files_below(path, exclude) if is_folder else [os.path.normpath(path)]:
            full = os.path.abspath(file)  # noqa: PTH100
            if full not in seen:
                seen.add(full)
                yield file


def _files_below(folder: str, exclude: Sequence[str]) -> Iterator[str]:
    for place, folders, files in os.walk(os.path.normpath(folder)):
        folders[:] = sorted(
            name for name in folders
            if not name.startswith(".") and name not in _SKIPPED
            and not os.path.exists(os.path.join(place, name, "pyvenv.cfg"))  # noqa: PTH110, PTH118
            and not matches(os.path.join(place, name), exclude)  # noqa: PTH118
        )  # fmt: skip
        for name in sorted(files):
            path = os.path.normpath(os.path.join(place, name))  # noqa: PTH118
            if name.endswith(".py") and not matches(path, exclude):
                yield path


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a path, its end, or its last part."""
    posix = path.replace(os.sep, "/")
    plain = [pattern.rstrip("/") for pattern in patterns]
    return any(
        fnmatch.fnmatch(name, pattern)
        for one in plain
        for name, pattern in ((posix, one), (posix, f"*/{one}"), (posix.rpartition("/")[2], one))
    )


@dataclass(eq=False)
class Source:
    """A parsed file.

    Attributes:
        path: The path as the user wrote it.
        data: The bytes of the file.
        tree: Its syntax tree.
    """

    path: str
    data: bytes
    tree: ast.Module

    @cached_property
    def lines(self) -> list[str]:
        """The lines without their ends, as Python splits them."""
        try:
            return importlib.util.decode_source(self.data).split("\n")
        except (SyntaxError, UnicodeDecodeError):  # flake8 has decoded it already.
            return self.data.decode("utf-8", "replace").split("\n")

    def line(self, number: int) -> str:
        """Return a line, counted from 1; "" if there is no such line."""
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def column(self, line: int, offset: int) -> int:
        """Convert an offset of the syntax tree, in UTF-8 bytes, to a column from 1."""
        start = self.line(line).encode("utf-8", "surrogatepass")[:offset]
        return len(start.decode("utf-8", "replace")) + 1


def parse(path: str, data: bytes) -> Source:
    """Parse a file without running it.

    Raises:
        SyntaxError: This interpreter cannot parse it.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escapes are for other tools to report.
            return Source(path, data, ast.parse(data, filename=path))
    except (ValueError, LookupError) as error:  # A null byte, or a codec that is not of text.
        raise SyntaxError(str(error)) from None
