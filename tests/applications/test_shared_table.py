"""Two plain objects that share one tensor."""

from __future__ import annotations

import pytest

from applications.harness import run_application


def check(how: str = "parts", mutant: str | None = None) -> None:
    """Retire one recommender: its own tensors are freed, and the other one still works."""
    facts = run_application("shared_table", how, mutant=mutant)
    assert facts["alive_mb"] == 0
    assert facts["grown_mb"] < 35
    assert facts["written"] == [7]
    assert facts["has_items"]
    assert facts["is_right"]


@pytest.mark.slow
def test_released_parts_are_freed_and_the_other_object_works() -> None:
    check()


@pytest.mark.slow
def test_released_object_is_freed_and_the_other_one_works() -> None:
    check("object")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "mutant"),
    [("parts", "leak"), ("object", "break_sharing"), ("parts", "skip_destructor")],
)
def test_sees_a_broken_product(how: str, mutant: str) -> None:
    with pytest.raises(AssertionError):
        check(how, mutant)
