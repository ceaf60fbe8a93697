"""The flake8 plug-in: the rules, as codes that begin with CEX, file by file."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from clean_exit.lint.discover import Survey
from clean_exit.lint.lint import check_project
from clean_exit.lint.project import Project
from clean_exit.lint.source import Source, read


class Plugin:
    """Checks a file, as flake8 shows one at a time.

    flake8 hides findings by its own comments (``# noqa: CEX001``) and its own settings.
    """

    name = "clean-exit-lint"
    off_by_default = True  # --enable-extensions=CEX turns it on.
    version = "1"

    def __init__(self, tree: ast.Module, filename: str = "-", lines: Sequence[str] = ()) -> None:
        self._source = Source(filename, "".join(lines).encode("utf-8", "replace"), tree)

    def run(self) -> Iterator[tuple[int, int, str, type[Plugin]]]:
        """Yield line, column from 0, and the text of each finding."""
        project = Project([], read)
        project.add(self._source)
        seen = Survey(telling={self._source.path: self._source.data})
        for one in sorted(check_project(project, seen), key=lambda one: (one.line, one.column)):
            yield one.line, one.column - 1, f"{one.code} {one.rule}: {one.message}", Plugin
