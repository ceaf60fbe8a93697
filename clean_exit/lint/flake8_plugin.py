"""The flake8 plugin: reports the rules under their CEX codes, one file at a time."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from clean_exit.lint.files import Source
from clean_exit.lint.findings import RULES
from clean_exit.lint.linter import check_source


class Plugin:
    """Checks one file.

    flake8 applies its own comments (``# noqa: CEX001``) and settings to the findings.
    """

    name = "clean-exit-lint"
    off_by_default = True  # --enable-extensions=CEX turns it on.
    version = "1"

    def __init__(self, tree: ast.Module, filename: str = "-", lines: Sequence[str] = ()) -> None:
        self._source = Source(filename, "".join(lines).encode("utf-8", "replace"), tree)

    def run(self) -> Iterator[tuple[int, int, str, type[Plugin]]]:
        """Yield the line, the column from 0, and the text of each finding."""
        for one in check_source(self._source):
            text = f"{RULES[one.rule].code} {one.rule}: {one.message}"
            yield one.line, one.column - 1, text, Plugin
