"""Every row of the matrix against every subject; the naive destructors are the control.

What the library makes must be silent and released exactly once. The naive ones only have to
fall short somewhere, which the plugin `summary` checks and prints when all have run.
"""

from __future__ import annotations

import pytest

from hazards.hosts import HOSTS
from hazards.matrix import CASES, HERE, ROWS, is_slow
from hazards.pythons import other_pythons
from hazards.row import OURS, Row
from hazards.runner import NEEDS_TORCH, Runner


def _marks(row: Row, subject: str, version: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.slow] if is_slow(row, subject, version) else []
    if subject in NEEDS_TORCH:
        # The programs with torch of one kind in one worker, which then imports it once.
        marks.append(pytest.mark.xdist_group(subject))
    return marks


@pytest.mark.parametrize(
    ("row", "subject", "version"),
    [
        pytest.param(*case, id="-".join((case[0].name, *case[1:])), marks=_marks(*case))
        for case in CASES
    ],
)
def test_row(
    row: Row,
    subject: str,
    version: str,
    runner: Runner,
    record_property: pytest.RecordProperty,
    request: pytest.FixtureRequest,
) -> None:
    """Silent, the right exit code, and released exactly once by whoever made it."""
    if subject == "model":  # Only then: making it imports half of the installed packages.
        runner.tiny_model = request.getfixturevalue("tiny_model")
    python = {} if version == HERE else {"python": other_pythons()[version]}
    outcome = runner.run(row, subject, **python)
    record_property("hazard", (subject, version, not outcome.problems))
    if not subject.startswith("naive"):
        assert not outcome.problems, str(outcome)


def test_every_row_is_in_the_fast_part() -> None:
    """`make test` runs each program against something of ours, and knows no name twice."""
    fast = {case[0].name for case in CASES if not is_slow(*case) and case[1] in OURS}
    names = [row.name for row in ROWS]
    slow_only = {row.name for row in ROWS if not {"resource", "retriever"} & set(row.subjects)}
    slow_only -= {row.name for row in HOSTS}
    assert set(names) - fast == slow_only
    assert len(set(names)) == len(names)
