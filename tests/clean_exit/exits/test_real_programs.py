"""What people run gets the verdict that it deserves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clean_exit.exits.real_programs import PROGRAMS, Program

pytestmark = [pytest.mark.slow, pytest.mark.real]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_verdict(program: Program, tmp_path: Path) -> None:
    """Its finding, and nothing but that; its exit code."""
    if missing := program.missing():
        pytest.skip(f"{program.group}: {missing} is not installed")
    report = program.run(tmp_path)
    said = f"{report}\n--- stdout\n{report.stdout[-3000:]}\n--- stderr\n{report.stderr[-3000:]}"
    assert {found.id for found in report.findings} == {program.finding} - {""}, said
    assert report.exit_code == program.exit_code, said
