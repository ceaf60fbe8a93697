"""The linter finds what the comments of dirty programs name, and nothing in clean ones.

`rules` has a file of programs for each rule. ``### dirty: NAME`` or ``### clean: NAME`` begins a
program. At the end of a line, ``# <- RULE`` names a rule that has to be found there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clean_exit.lint import RULES, check


def read_programs(rule: str) -> dict[str, str]:
    text = (Path(__file__).parent / "rules" / f"{rule}.txt").read_text("utf-8")
    _, *parts = re.split(r"^### (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_findings_are_where_the_marks_are(rule: str, tmp_path: Path) -> None:
    """With all rules, with this rule alone, and without it."""
    path, programs = tmp_path / "program.py", read_programs(rule)
    assert sum(name.startswith("dirty: ") for name in programs) >= 4
    for name, program in programs.items():
        path.write_text(program, encoding="utf-8")
        marks = {
            (number, found)
            for number, line in enumerate(program.splitlines(), start=1)
            for match in re.finditer(r"# <- ([\w -]+)$", line)
            for found in match[1].split()
        }
        assert bool(marks) == name.startswith("dirty: "), name
        own = {mark for mark in marks if mark[1] == rule}
        for select, ignore, expected in (
            ((), (), marks),
            ([rule], (), own),
            ((), [rule], marks - own),
        ):
            findings = check([str(path)], select=select, ignore=ignore).findings
            assert {(one.line, one.rule) for one in findings} == expected, name
