"""A notebook whose cells reload a model."""

from __future__ import annotations

import pytest

from tests.examples.applications.harness import run_application

pytestmark = pytest.mark.slow  # The kernel and its client import much.


def check(python: str, rounds: int = 1, mutant: str | None = None) -> None:
    """Load, show, fail and release in cells, again and again; then shut the kernel down."""
    facts = run_application("notebook", str(rounds), mutant=mutant, python=python)
    releases = range(1, 2 * rounds + 1)
    assert [alive_mb for alive_mb, _, _ in facts["measured"]] == [0] * len(releases)
    assert all(grown_mb < 35 for _, grown_mb, _ in facts["measured"]), facts
    assert [closed for _, _, closed in facts["measured"]] == list(releases)
    assert facts["answers"] == [facts["answers"][0]] * len(releases)
    assert facts["is_right"]
    assert facts["exit_code"] == 0
    assert facts["log_closed"]  # By the exit of the kernel.


def test_memory_stays_flat_over_reloads_in_cells(applications_python: str) -> None:
    check(applications_python, rounds=4)


@pytest.mark.parametrize("mutant", ["leak", "break_sharing", "skip_destructor"])
def test_sees_a_broken_product(applications_python: str, mutant: str) -> None:
    with pytest.raises(AssertionError):
        check(applications_python, mutant=mutant)
