"""Read the programs in this folder, and what their comments say has to be found.

``### NAME`` begins a program, and ``# file: PATH`` a file of it, if it has several. At the end of a
line, ``# <- RULE`` names a rule that has to be found there, and ``# <? RULE`` one that may be found
as well. Nothing else may be found in a dirty program, and nothing at all in a clean one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from support.clean_exit import lint_as_command

Place = tuple[str, int, str]
"""A file, a line and a rule."""
MUST = re.compile(r"# <- ([\w -]+?)(?= <\?|$)")
MAY = re.compile(r"<\? ([\w -]+)$")


def read_programs(pattern: str) -> dict[str, str]:
    """Return the programs of some files in this folder by file and name."""
    programs: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob(pattern)):
        _, *parts = re.split(r"^### (.*)\n", path.read_text("utf-8"), flags=re.MULTILINE)
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            assert f"{path.stem}: {name}" not in programs, f"{path}: two are called {name!r}"
            programs[f"{path.stem}: {name}"] = text
    assert programs, f"there is no program in {pattern}"
    return programs


def marks(program: str, mark: re.Pattern[str]) -> set[Place]:
    """Return the places and rules that the comments of a program name."""
    return {
        (path, number, rule)
        for path, text in _files(program).items()
        for number, line in enumerate(text.splitlines(), start=1)
        for match in mark.finditer(line)
        for rule in match[1].split()
    }


def found(program: str, folder: Path, **options: Collection[str]) -> set[Place]:
    """Write a program into an empty folder, and return what the linter finds in it."""
    for path, text in _files(program).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    findings, _ = lint_as_command([folder], **options)
    return {(Path(one.path).relative_to(folder).as_posix(), one.line, one.rule) for one in findings}


def _files(program: str) -> dict[str, str]:
    first, *parts = re.split(r"^# file: (.*)\n", program, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True)) if parts else {"program.py": first}
