"""A worker thread that embeds batches, which are released one by one."""

from __future__ import annotations

import pytest

from applications.harness import run_application


def check(how: str = "alone", mutant: str | None = None) -> None:
    """Memory stays flat over 20 batches of 50 MB, and a model with the same table goes on."""
    facts = run_application("embedding_worker", how, mutant=mutant)
    assert facts["left_mb"] == 0
    assert facts["means"]
    assert facts["is_right"]
    assert facts["closed"] == ["documents"]
    assert facts["grown_mb"] < 110, "more than two batches"


@pytest.mark.slow
def test_released_batches_return_their_memory() -> None:
    check()


@pytest.mark.slow
def test_released_batches_return_their_memory_beside_a_sleeping_thread() -> None:
    check("heartbeat")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["leak", "break_sharing", "skip_destructor"])
def test_sees_a_broken_product(mutant: str) -> None:
    with pytest.raises(AssertionError):
        check(mutant=mutant)
