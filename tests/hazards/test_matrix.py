"""Every row of the matrix against every subject; the naive destructors are the control.

What the library makes must be silent and released exactly once. The naive ones only have to
fall short somewhere, which `tests/conftest.py` checks and prints when all have run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hazards.more_rows import ROWS
from hazards.pythons import other_pythons
from hazards.rows import Row
from hazards.runner import NEEDS_TORCH, Runner

HERE = "this Python"
CASES = [
    (row, subject, HERE)
    for row in ROWS
    for subject in row.subjects
    if not (subject == "naive" and row.needs_torch)
] + [
    (row, subject, version)
    for version in other_pythons()
    for row in ROWS
    for subject in row.subjects
    if not row.needs_torch and subject not in NEEDS_TORCH
]


@pytest.fixture(scope="session")
def runner(tiny_model: Path) -> Iterator[Runner]:
    runner = Runner(tiny_model)
    yield runner
    runner.close()


@pytest.mark.parametrize(
    ("row", "subject", "version"),
    [
        pytest.param(
            *case,
            id="-".join((case[0].name, *case[1:])),
            # The programs with torch of one kind in one worker, which then imports it once.
            marks=pytest.mark.xdist_group(case[1]) if case[1] in NEEDS_TORCH else (),
        )
        for case in CASES
    ],
)
def test_row(
    row: Row, subject: str, version: str, runner: Runner, record_property: pytest.RecordProperty
) -> None:
    """Silent, the right exit code, and released exactly once by whoever made it."""
    python = {} if version == HERE else {"python": other_pythons()[version]}
    outcome = runner.run(row, subject, **python)
    record_property("hazard", (subject, version, not outcome.problems))
    if not subject.startswith("naive"):
        assert not outcome.problems, str(outcome)
