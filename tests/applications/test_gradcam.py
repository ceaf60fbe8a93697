"""Grad-CAM: an object whose hooks keep feature maps of a model that is used further."""

from __future__ import annotations

import pytest

from applications.harness import run_application


def check(how: str = "maps", mutant: str | None = None) -> None:
    """The feature maps are freed, the hooks are gone, and the model computes and trains."""
    facts = run_application("gradcam", how, mutant=mutant)
    assert facts["held_mb"] > 60
    assert facts["heat"] == [4, 256, 256]
    assert facts["alive_mb"] == 0
    assert facts["grown_mb"] < 35
    assert facts["hook_calls"] == []
    assert facts["is_right"]
    assert facts["trains"]


@pytest.mark.slow
def test_released_maps_are_freed_and_the_model_works() -> None:
    check()


@pytest.mark.slow
def test_released_object_is_freed_and_the_model_works() -> None:
    check("object")


@pytest.mark.slow
def test_closable_object_is_freed_and_the_model_works() -> None:
    check("closable")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "mutant"),
    [("maps", "leak"), ("object", "break_sharing"), ("closable", "skip_destructor")],
)
def test_sees_a_broken_product(how: str, mutant: str) -> None:
    with pytest.raises(AssertionError):
        check(how, mutant)
