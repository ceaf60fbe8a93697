"""The modules of a project: which file an import statement means."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

from clean_exit.lint.files import Source, UnreadableError, distribution, parse, read
from clean_exit.lint.findings import Note
from clean_exit.lint.scopes import Module, read_module


class Project:
    """Parses a file when it is needed first; nothing is imported.

    Imports from a file's own package, or from the folder of a file outside of packages, are read
    even if those files are not among the files to check.
    """

    def __init__(self, paths: Iterable[str], known: Mapping[str, bytes]) -> None:
        self._checked = {os.path.abspath(path): path for path in paths}  # noqa: PTH100  (hot)
        self._known = known
        self._modules: dict[str, Module | None] = {}
        self._found: dict[tuple[str, str], str | None] = {}
        self.notes: list[Note] = []

    def module(self, path: str) -> Module | None:
        """Return the module of a file; None if it cannot be parsed, which adds a note."""
        full = os.path.abspath(path)  # noqa: PTH100
        if full not in self._modules:
            self._modules[full] = None  # Ends the recursion.
            name = self._checked.get(full, path)
            try:
                self._modules[full] = self._make(
                    full, parse(name, self._known.get(name) or read(name))
                )
            except UnreadableError as error:
                self.notes.append(Note(name, error.line, str(error)))
            except RecursionError:
                self.notes.append(Note(name, 0, "not read: the code is nested too deeply"))
        return self._modules[full]

    def add(self, source: Source) -> Module:
        """Add a file to check that is parsed already, such as one from flake8."""
        full = os.path.abspath(source.path)  # noqa: PTH100
        self._checked[full] = source.path
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
        """Return the folder of the top-level package, which must be on ``sys.path``."""
        while self._is_file(os.path.join(folder, "__init__.py")):  # noqa: PTH118
            above = os.path.dirname(folder)  # noqa: PTH120
            if above == folder:
                break
            folder = above
        return folder

    def find(self, importer: Module, dotted: str, level: int = 0) -> Module | None:
        """Return the module that an import statement names, if its file is found.

        Args:
            importer: The module with the statement.
            dotted: The name in the statement, without leading dots.
            level: The number of leading dots.
        """
        folder = os.path.dirname(os.path.abspath(importer.source.path))  # noqa: PTH100, PTH120
        key = (folder, "." * level + dotted)
        if key not in self._found:
            self._found[key] = self._search(folder, dotted, level)
        path = self._found[key]
        is_standard = not level and dotted.partition(".")[0] in sys.stdlib_module_names
        if path and is_standard and distribution(path) != distribution(importer.source.path):
            return None  # A file of the project does not replace the standard library.
        return self.module(path) if path else None

    def _search(self, folder: str, dotted: str, level: int) -> str | None:
        if level:
            for _ in range(level - 1):
                folder = os.path.dirname(folder)  # noqa: PTH120
            return self._at(folder, dotted)
        if not dotted:
            return None
        return self._at(self._root(folder), dotted)

    def is_checked(self, module: Module) -> bool:
        """Whether the file of a module is one of those to check."""
        return os.path.abspath(module.source.path) in self._checked  # noqa: PTH100

    def _at(self, folder: str, dotted: str) -> str | None:
        base = os.path.join(folder, *dotted.split(".")) if dotted else folder  # noqa: PTH118
        package = os.path.join(base, "__init__.py")  # noqa: PTH118
        if self._is_file(package):
            return package
        file = base + ".py"
        return file if dotted and self._is_file(file) else None

    def _is_file(self, path: str) -> bool:
        return path in self._checked or os.path.isfile(path)  # noqa: PTH113
