"""A training run that is resumed from a checkpoint in the same process."""

from __future__ import annotations

from pathlib import Path

import pytest

from applications.harness import run_application


def check(folder: Path, mutant: str | None = None) -> None:
    """Each run gives its memory back, and the resumed run ends like the uninterrupted one."""
    facts = run_application("training", str(folder), mutant=mutant)
    assert facts["alive_mb"] == [0, 0, 0]
    assert facts["grown_mb"] < 40
    assert facts["epochs"] == 2
    assert facts["same_losses"]
    assert facts["same_files"]
    assert facts["same_weights"]
    assert facts["is_right"]


@pytest.mark.slow
def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["leak", "break_sharing", "skip_destructor"])
def test_sees_a_broken_product(tmp_path: Path, mutant: str) -> None:
    with pytest.raises(AssertionError):
        check(tmp_path, mutant)
