"""The linter finds what the comments of dirty programs name, and nothing in clean ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from acceptance.lint.programs import MAY, MUST, found, marks, read_programs
from support.clean_exit import RULES, lint_as_command

DIRTY, CLEAN = read_programs("dirty_*.txt"), read_programs("clean_*.txt")


@pytest.mark.parametrize("name", DIRTY)
def test_dirty_program(name: str, tmp_path: Path) -> None:
    must, may = marks(DIRTY[name], MUST), marks(DIRTY[name], MAY)
    assert must or may
    seen = found(DIRTY[name], tmp_path, select=["all"])
    if name.startswith("dirty_python_312: ") and sys.version_info < (3, 12):
        assert seen == set()
        assert "not parsed" in lint_as_command([tmp_path / "program.py"])[1]
        return
    assert must - seen == set(), "not found"
    assert seen - must - may == set(), "false alarms"


@pytest.mark.parametrize("name", CLEAN)
def test_clean_program(name: str, tmp_path: Path) -> None:
    assert found(CLEAN[name], tmp_path) == set()


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_alone_finds_its_marks(rule: str, tmp_path: Path) -> None:
    """Without the rule exactly these are missed: the control of the tests above."""
    every = [text for name, text in DIRTY.items() if "python_312" not in name]
    programs = [text for text in every if rule in {r for *_, r in marks(text, MUST)}]
    assert len(programs) >= 2
    for number, text in enumerate(programs):
        folder = tmp_path / str(number)
        own = {one for one in marks(text, MUST) if one[2] == rule}
        alone = found(text, folder, select=[rule])
        assert own <= alone
        assert {one[2] for one in alone} == {rule}
        assert own.isdisjoint(found(text, folder, select=["all"], ignore=[rule]))
