"""Every row of the matrix: silent, the right exit code, and released exactly once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.other_pythons import other_pythons
from tests.torch_utils.hazards.matrix import CASES, CONTROLS, HERE, Case, is_slow
from tests.torch_utils.hazards.row import Row
from tests.torch_utils.hazards.runner import NEEDS_TORCH, Runner


def _params(cases: list[Case]) -> list[Any]:
    found = []
    for row, subject, version in cases:
        marks = [pytest.mark.slow] if is_slow(row, subject, version) else []
        if subject in NEEDS_TORCH:
            # The programs with torch of one kind in one worker, which then imports it once.
            marks.append(pytest.mark.xdist_group(subject))
        name = "-".join((row.name, subject, version))
        found.append(pytest.param(row, subject, version, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("row", "subject", "version"), _params(CASES))
def test_released_exactly_once_and_silent(
    row: Row, subject: str, version: str, runner: Runner, request: pytest.FixtureRequest
) -> None:
    if subject == "model":  # Only then: making it imports half of the installed packages.
        runner.tiny_model = request.getfixturevalue("tiny_model")
    python = {} if version == HERE else {"python": other_pythons()[version]}
    outcome = runner.run(row, subject, **python)
    assert not outcome.problems, str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "subject", "version"), _params(CONTROLS))
def test_naive_destructor_falls_short(row: Row, subject: str, version: str, runner: Runner) -> None:
    outcome = runner.run(row, subject)
    assert outcome.problems, str(outcome)
