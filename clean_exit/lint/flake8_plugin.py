"""The flake8 plugin: reports the rules under their CEX codes, one file at a time."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from clean_exit.lint.files import Source
from clean_exit.lint.findings import RULES
from clean_exit.lint.linter import check_project, one_for_each_statement
from clean_exit.lint.project import Project


class Plugin:
    """Checks one file.

    flake8 applies its own comments (``# noqa: CEX001``) and settings to the findings.
    """

    name = "clean-exit-lint"
    off_by_default = True  # --enable-extensions=CEX turns it on.
    version = "1"

    def __init__(self, tree: ast.Module, filename: str = "-", lines: Sequence[str] = ()) -> None:
        self._source = Source(filename, "".join(lines).encode("utf-8", "replace"), tree)

    @staticmethod
    def add_options(option_manager: Any) -> None:
        """Leave out the opt-in rules, unless flake8's ``--extend-select`` names them."""
        option_manager.extend_default_ignore(
            [rule.code for rule in RULES.values() if not rule.default]
        )

    def run(self) -> Iterator[tuple[int, int, str, type[Plugin]]]:
        """Yield the line, the column from 0, and the text of each finding."""
        project = Project([], {})
        project.add(self._source)
        found = one_for_each_statement(check_project(project, [self._source.path]), self._source)
        for one in sorted(found, key=lambda one: (one.line, one.column)):
            yield one.line, one.column - 1, f"{one.code} {one.rule}: {one.message}", Plugin
