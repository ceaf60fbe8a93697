"""Tests of an interrupt at any instruction of a release."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support.interrupts import Place, interrupt_everywhere, send_sigint
from support.releasing import gone, index_with_vectors, optimizer_with_state, search_time, weak
from torch_utils import ReleasedError, release

places = pytest.mark.parametrize("at_most", [60, pytest.param(150, marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Freeze the heap, so that the many releases search only the objects of a check."""
    gc.collect()
    gc.freeze()
    with search_time(0.0):
        yield
    gc.unfreeze()


def release_here(*objects: Any) -> None:
    assert release(*objects, collect="never", trim_host=False).errors == ()


class Slotted(nn.Linear):
    __slots__ = ("more",)


@pytest.mark.slow
@places
def test_next_release_completes_an_interrupted_one_of_a_model(at_most: int) -> None:
    def check(place: Place) -> None:
        model = nn.Sequential(nn.Linear(4, 4), Slotted(4, 4), nn.Sequential(nn.BatchNorm1d(4)))
        layers, storages = list(model.modules()), weak(model)
        place.run(lambda: release_here(model))
        assert place.propagated == place.delivered
        release_here(model, *layers)
        assert gone(storages)
        for layer in layers:
            with pytest.raises(ReleasedError, match="was released"):
                layer(torch.ones(2, 4))

    interrupt_everywhere(
        check, package="torch_utils", minimum=30, at_most=at_most, deliver=send_sigint
    )


@pytest.mark.slow
@places
def test_next_release_completes_an_interrupted_one_of_tensors(at_most: int) -> None:
    def check(place: Place) -> None:
        tensors = [torch.ones(2) for _ in range(5)]
        storages = weak(*tensors)
        place.run(lambda: release_here(tensors))
        assert place.propagated == place.delivered
        assert {tensor.numel() for tensor in tensors} in ({0}, {2})
        release_here(tensors)
        assert {tensor.numel() for tensor in tensors} == {0}
        assert gone(storages)

    interrupt_everywhere(
        check, package="torch_utils", minimum=30, at_most=at_most, deliver=send_sigint
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "use"),
    [
        (index_with_vectors, lambda index: index.search(np.ones((1, 8), np.float32), 1)),
        (optimizer_with_state, lambda optimizer: optimizer.step()),
    ],
    ids=["index", "optimizer"],
)
def test_next_release_completes_an_interrupted_one_of_an_index_or_optimizer(
    make: Callable[[], Any], use: Callable[[Any], Any]
) -> None:
    def check(place: Place) -> None:
        thing = make()
        place.run(lambda: release_here(thing))
        assert place.propagated == place.delivered
        with contextlib.suppress(ReleasedError):
            use(thing)
        release_here(thing)
        with pytest.raises(ReleasedError):
            use(thing)

    interrupt_everywhere(check, package="torch_utils", minimum=30, at_most=60, deliver=send_sigint)


class Noticing(torch.Tensor):
    """Counts the functions of torch that receive it."""

    calls = 0

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        cls.calls += 1
        return super().__torch_function__(function, types, arguments, keywords or {})


def is_undisturbed() -> bool:
    """Return whether overrides, the default device and gradients work as usual."""
    before = Noticing.calls
    torch.add(torch.ones(1).as_subclass(Noticing), 1)
    with torch.device("meta"):
        is_noticed = Noticing.calls > before and torch.ones(1).is_meta
    return is_noticed and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def places_that_disturb(package: str, minimum: int, program: Callable[..., object]) -> list[str]:
    """Return the places where an interrupt leaves torch in another state."""
    kept: list[BaseException] = []  # As a notebook keeps the last exception, with its frames.
    found = []

    def keep(number: int, frame: object) -> None:
        kept.append(KeyboardInterrupt())
        raise kept[-1]

    def check(place: Place) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        things = [model, torch.ones(2), nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse()]
        place.run(lambda: program(*things))
        if not is_undisturbed():
            found.append(place.where)
            kept.clear()  # What it has left behind must not break the tests that follow.
            bindings = vars(torch)["_C"]
            if hasattr(bindings, "_set_torch_function_state"):  # Not torch 2.4.
                enabled = vars(bindings)["_TorchFunctionState"].ENABLED
                vars(bindings)["_set_torch_function_state"](enabled)

    before = signal.signal(signal.SIGINT, keep)
    try:
        interrupt_everywhere(
            check, package=package, minimum=minimum, at_most=150, deliver=send_sigint
        )
    finally:
        signal.signal(signal.SIGINT, before)
    return found


@pytest.mark.slow
def test_interrupt_leaves_torch_functions_enabled() -> None:
    assert places_that_disturb("torch_utils", 30, release_here) == []
