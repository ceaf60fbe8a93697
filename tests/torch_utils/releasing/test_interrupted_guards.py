"""A Ctrl-C in a release leaves torch's functions as they were in that thread."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from interrupts import Interrupt, everywhere, run_interrupted

from torch_utils import release


class Noticing(torch.Tensor):
    """Counts which functions of torch it is passed to."""

    asked = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        cls.asked += 1
        return super().__torch_function__(function, types, arguments, keywords or {})


def is_noticed() -> bool:
    """Whether classes of tensors have a say, and a default device too."""
    before = Noticing.asked
    torch.add(torch.ones(1).as_subclass(Noticing), 1)
    with torch.device("meta"):
        return Noticing.asked > before and torch.ones(1).is_meta


def modules() -> list:
    return [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))]


def tensors() -> list:
    sparse = torch.eye(2).to_sparse()
    return [torch.ones(2), torch.nn.Parameter(torch.ones(2)), sparse]


def breaks_after_interrupts(make, program, *files: str) -> list[int]:
    """List after which interrupts of the calls in some files it is not as it was."""
    kept = []  # As a notebook keeps the last exception, with its frames.
    broken = []

    def keep() -> None:
        kept.append(Interrupt())
        raise kept[-1]

    def check(number: int) -> bool:
        things = make()
        happened, _ = run_interrupted(
            lambda: program(*things), number, *files, handler=keep, calls_only=True
        )
        if not is_noticed() or torch.is_inference_mode_enabled():
            broken.append(number)
            kept.clear()  # What it has left behind must not break the tests that follow.
            if hasattr(torch._C, "_set_torch_function_state"):  # Not torch 2.4.
                torch._C._set_torch_function_state(torch._C._TorchFunctionState.ENABLED)
        return happened

    gc.collect()
    gc.freeze()  # A release walks the heap, which is only what a check makes.
    try:
        assert everywhere(check) > 2
    finally:
        gc.unfreeze()
    return broken


@pytest.mark.parametrize("make", [modules, tensors])
def test_torch_functions_are_not_left_disabled(make) -> None:
    """At whichever call it comes, and while the exception lives."""
    files = ("torch_utils/_releasing", "contextlib.py", "grad_mode.py")
    assert breaks_after_interrupts(make, release, *files) == []


def test_control_a_context_manager_in_python_leaves_them() -> None:
    """The same with torch's guards in a generator: before its end it is left as it is."""

    @contextlib.contextmanager
    def undisturbed():
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            yield

    def program() -> None:
        with undisturbed():
            pass

    assert breaks_after_interrupts(list, program, "contextlib.py")
