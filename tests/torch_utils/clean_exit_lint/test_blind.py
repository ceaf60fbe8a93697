"""The rules against programs in the style of real code, some of several files.

They were written before the linter's own code was read, to see what it misses. What has to be found
stands at the end of its line after ``# <- ``, what may be found as well after ``# <? ``; anything
else that is found is a false alarm. ``# file: name`` begins a file.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torch_utils.clean_exit_lint import RULES, check, python_files

FOLDER = Path(__file__).with_name("blind")
MARK = re.compile(r"# <- ([\w -]+?)(?= <\?|$)")
MAYBE = re.compile(r"<\? ([\w -]+)$")


def programs(pattern: str) -> dict[str, str]:
    """Return the programs of some files by their names, which stand after ``###``."""
    found: dict[str, str] = {}
    for path in sorted(FOLDER.glob(pattern)):
        _, *parts = re.split(r"^### (.*)\n", path.read_text("utf-8"), flags=re.MULTILINE)
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            assert name not in found, f"two programs are called {name!r}"
            found[name] = text
    return found


DIRTY, CLEAN = programs("dirty_*.txt"), programs("clean_*.txt")


def write(source: str, folder: Path) -> dict[str, str]:
    """Write the files of a program into a folder and return them by their names."""
    parts = re.split(r"^# file: (.*)\n", source, flags=re.MULTILINE)
    files = (
        {"program.py": source}
        if len(parts) == 1
        else dict(zip(parts[1::2], parts[2::2], strict=True))
    )
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return files


def marked(files: dict[str, str], mark: re.Pattern[str]) -> set[tuple[str, int, str]]:
    """Return the places and rules that the comments of the files name."""
    return {
        (name, number, rule)
        for name, text in files.items()
        for number, line in enumerate(text.splitlines(), start=1)
        for match in mark.finditer(line)
        for rule in match[1].split()
    }


def found(folder: Path) -> set[tuple[str, int, str]]:
    """Return what is found in the files of a folder."""
    findings = check(python_files([str(folder)])).findings
    return {(Path(one.path).relative_to(folder).as_posix(), one.line, one.rule) for one in findings}


@pytest.mark.parametrize("name", DIRTY)
def test_dirty(name: str, tmp_path: Path) -> None:
    """All that is marked is found, and nothing else."""
    files = write(DIRTY[name], tmp_path)
    wanted, seen = marked(files, MARK), found(tmp_path)
    assert wanted - seen == set(), "not found"
    assert seen - wanted - marked(files, MAYBE) == set(), "false alarms"


@pytest.mark.parametrize("name", CLEAN)
def test_clean(name: str, tmp_path: Path) -> None:
    """Nothing is found."""
    write(CLEAN[name], tmp_path)
    assert found(tmp_path) == set()


def test_every_rule_is_marked_four_times() -> None:
    """Each rule has several programs."""
    rules = [rule for text in DIRTY.values() for _, _, rule in marked({"": text}, MARK)]
    assert {rule: rules.count(rule) for rule in RULES if rules.count(rule) < 4} == {}
