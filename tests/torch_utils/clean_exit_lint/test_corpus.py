"""The rules against files that are dirty and files that are clean."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from torch_utils.clean_exit_lint import RULES, check, python_files

from .clean import CLEAN
from .dirty import DIRTY, NEEDS_312


def found(path: Path, source: str) -> set[tuple[int, str]]:
    """Write a file and return the lines and rules that are found in it."""
    path.write_text(source, encoding="utf-8")
    return {(one.line, one.rule) for one in check(python_files([str(path)])).findings}


def expected(source: str) -> set[tuple[int, str]]:
    """Return what the comments of a file say."""
    return {
        (number, rule)
        for number, line in enumerate(source.splitlines(), start=1)
        for rule in (line.partition("# <- ")[2]).split()
    }


@pytest.mark.parametrize("name", DIRTY)
def test_dirty(name: str, tmp_path: Path) -> None:
    """What is marked is found."""
    wanted = expected(DIRTY[name])
    assert wanted
    assert {rule for _, rule in wanted} <= set(RULES)
    assert wanted <= found(tmp_path / "dirty.py", DIRTY[name])


@pytest.mark.parametrize("name", CLEAN)
def test_clean(name: str, tmp_path: Path) -> None:
    """Nothing is found."""
    assert found(tmp_path / "clean.py", CLEAN[name]) == set()


@pytest.mark.parametrize("name", NEEDS_312)
def test_newer_syntax(name: str, tmp_path: Path) -> None:
    """Found by a Python that knows it; by an older one, it is said that it is not read."""
    path = tmp_path / "new.py"
    wanted = expected(NEEDS_312[name])
    if sys.version_info >= (3, 12):
        assert wanted <= found(path, NEEDS_312[name])
    else:
        assert found(path, NEEDS_312[name]) == set()
        assert "not parsed" in str(check([str(path)]).notes[0])


def test_every_rule_is_in_the_corpus() -> None:
    """Each has a dirty file."""
    said = {rule for source in DIRTY.values() for _, rule in expected(source)}
    assert said == set(RULES)


def test_marks_are_seen() -> None:
    """A control: a mark on a line without a finding is missed."""
    source = "class A:\n    x = 1  # <- import\n"
    assert expected(source) == {(2, "import")}
    assert not re.search("__del__", source)
