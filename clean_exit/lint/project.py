"""The files that were given: which module each one is, and what an import in one of them means."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable

from clean_exit.lint.findings import Note
from clean_exit.lint.scopes import Module, read_module
from clean_exit.lint.source import Source, UnreadableError, parse

_LIBRARY = re.compile(r"python3\.\d+")
Reader = Callable[[str], bytes]


class Project:
    """Parses files when something in them is asked for, and no others.

    Nothing is imported: a module is known if its file is one of those that were given.
    """

    def __init__(self, paths: Iterable[str], read: Reader) -> None:
        self._given = {os.path.abspath(path): path for path in paths}  # noqa: PTH100  (hot)
        self._read = read
        self._modules: dict[str, Module | None] = {}
        self._found: dict[tuple[str, str], str | None] = {}
        self._roots: dict[str, str] = {}
        self.notes: list[Note] = []

    def module(self, path: str) -> Module | None:
        """Return a file's module; None, and a note, if it cannot be parsed."""
        full = os.path.abspath(path)  # noqa: PTH100
        if full not in self._modules:
            self._modules[full] = None  # What asks for it again, while it is read, goes without.
            shown = self._given.get(full, path)
            try:
                self._modules[full] = self._make(full, parse(shown, self._read(shown)))
            except UnreadableError as error:
                self.notes.append(Note(shown, error.line, str(error)))
            except RecursionError:
                self.notes.append(Note(shown, 0, "not read: it is nested too deeply"))
        return self._modules[full]

    def add(self, source: Source) -> Module:
        """Take a file that is parsed already, as flake8 hands them out."""
        full = os.path.abspath(source.path)  # noqa: PTH100
        self._given[full] = source.path
        module = self._modules[full] = self._make(full, source)
        return module

    def _make(self, full: str, source: Source) -> Module:
        folder, file = os.path.split(full)
        stem = os.path.splitext(file)[0]  # noqa: PTH122
        below = os.path.relpath(folder, self._root(folder)).replace(os.sep, ".")
        parts = [part for part in (below.strip("."), stem) if part]
        if stem == "__init__":
            parts.pop()
        return read_module(source, ".".join(parts), is_package=stem == "__init__")

    def _root(self, folder: str) -> str:
        """Return the folder that has to be on ``sys.path`` for a package's folder."""
        if folder not in self._roots:
            above = os.path.dirname(folder)  # noqa: PTH120
            is_package = os.path.join(folder, "__init__.py") in self._given  # noqa: PTH118
            root = self._root(above) if is_package and above != folder else folder
            self._roots[folder] = root
        return self._roots[folder]

    def find(self, importer: Module, dotted: str, level: int = 0) -> Module | None:
        """Return the module that an import statement names, if its file was given."""
        folder = os.path.dirname(os.path.abspath(importer.source.path))  # noqa: PTH100, PTH120
        key = (folder, "." * level + dotted)
        if key not in self._found:
            self._found[key] = self._search(folder, dotted, level)
        path = self._found[key]
        is_standard = not level and dotted.partition(".")[0] in sys.stdlib_module_names
        if path and is_standard and distribution(path) != distribution(importer.source.path):
            return None  # The standard library, where it is what is read, is known by its names.
        return self.module(path) if path else None

    def _search(self, folder: str, dotted: str, level: int) -> str | None:
        if level:
            for _ in range(level - 1):
                folder = os.path.dirname(folder)  # noqa: PTH120
            return self._at(folder, dotted)
        if not dotted:
            return None
        root = self._root(folder)
        found = self._at(root, dotted)
        if found or dotted.partition(".")[0] in sys.stdlib_module_names:
            return found
        while root != os.path.dirname(root):  # noqa: PTH120
            root = os.path.dirname(root)  # noqa: PTH120
            # A project keeps its packages below, or in a folder "src".
            found = self._at(root, dotted) or self._at(os.path.join(root, "src"), dotted)  # noqa: PTH118
            if found:
                return found
        return None

    def _at(self, folder: str, dotted: str) -> str | None:
        base = os.path.join(folder, *dotted.split(".")) if dotted else folder  # noqa: PTH118
        package = os.path.join(base, "__init__.py")  # noqa: PTH118
        if package in self._given:
            return package
        file = base + ".py"
        return file if dotted and file in self._given else None


def distribution(path: str) -> str:
    """Return to which installed package a file belongs; nothing for a project's own files.

    From one package into another nothing is followed: there, more depends on how it is used.
    """
    parts = path.replace(os.sep, "/").split("/")
    for at in range(len(parts) - 2, -1, -1):
        if parts[at] in {"site-packages", "dist-packages"} or _LIBRARY.fullmatch(parts[at]):
            return parts[at + 1].partition(".")[0]
    return ""
