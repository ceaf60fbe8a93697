"""An ensemble on one shared backbone."""

from __future__ import annotations

from typing import Any

import pytest

from applications.harness import run_application


def check(how: str = "scope", mutant: str | None = None) -> dict[str, Any]:
    """Retire one classifier: its head is freed, and the other one still works."""
    facts = run_application("ensemble", how, mutant=mutant)
    assert facts["head_alive_mb"] == 0
    assert facts["grown_mb"] < 20
    assert facts["closed"] == ["large"]
    assert facts["is_right"]
    assert facts["trains"]
    return facts


@pytest.mark.parametrize("how", ["scope", pytest.param("release", marks=pytest.mark.slow)])
def test_retired_member_is_freed_and_the_other_still_works(how: str) -> None:
    check(how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["scope", "release"])
def test_destructor_of_a_submodule_runs(how: str) -> None:
    assert check(how)["dropped"] == [40_000]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["leak", "break_sharing", "skip_destructor"])
def test_sees_a_broken_product(mutant: str) -> None:
    with pytest.raises(AssertionError):
        check(mutant=mutant)
