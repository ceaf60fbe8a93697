"""Read the examples in `rules`: for each rule one file with dirty and clean programs.

``### dirty: NAME`` or ``### clean: NAME`` begins a program. At the end of a line, ``# <- RULE``
names a rule that has to be found there. Nothing else may be found.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from tests.support.clean_exit import lint_as_command

Place = tuple[int, str]
"""A line and a rule."""
_MARK = re.compile(r"# <- ([\w -]+)$")


def read_programs(rule: str) -> dict[str, str]:
    """Return the programs of a rule by name."""
    path = Path(__file__).parent / "rules" / f"{rule}.txt"
    _, *parts = re.split(r"^### (.*)\n", path.read_text("utf-8"), flags=re.MULTILINE)
    names = parts[::2]
    assert len({*names}) == len(names), f"{path}: two programs have the same name"
    return dict(zip(names, parts[1::2], strict=True))


def marks(program: str) -> set[Place]:
    """Return the places and rules that the comments of a program name."""
    return {
        (number, rule)
        for number, line in enumerate(program.splitlines(), start=1)
        for match in _MARK.finditer(line)
        for rule in match[1].split()
    }


def found(program: str, folder: Path, **options: Collection[str]) -> set[Place]:
    """Write a program into a folder, and return what the linter finds in it."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    findings, _ = lint_as_command([folder / "program.py"], **options)
    return {(one.line, one.rule) for one in findings}
