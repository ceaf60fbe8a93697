"""The linter finds what the comments of dirty programs name, and nothing in clean ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clean_exit.lint.marked_programs import found, marks, read_programs
from tests.support.clean_exit import RULES

PROGRAMS = {f"{rule}: {name}": text for rule in RULES for name, text in read_programs(rule).items()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_findings_are_where_the_marks_are(name: str, tmp_path: Path) -> None:
    expected = marks(PROGRAMS[name])
    assert bool(expected) == (": dirty: " in name)
    assert found(PROGRAMS[name], tmp_path) == expected


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_alone_finds_its_marks(rule: str, tmp_path: Path) -> None:
    """Without the rule exactly these are missed: the control of the test above."""
    dirty = [text for name, text in PROGRAMS.items() if (rule in {r for _, r in marks(text)})]
    assert len(dirty) >= 4
    for text in dirty:
        own = {one for one in marks(text) if one[1] == rule}
        assert found(text, tmp_path, select=[rule]) == own
        assert found(text, tmp_path, ignore=[rule]) == marks(text) - own
