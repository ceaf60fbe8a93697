"""Tests of an interrupt at any instruction of a release."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from support.interrupts import Place, interrupt_everywhere, send_sigint
from support.releasing import gone, index_with_vectors, optimizer_with_state, search_time, weak
from torch_utils import ReleasedError, release


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
def test_next_release_completes_an_interrupted_one_of_a_model() -> None:
    def check(place: Place) -> None:
        model = nn.Sequential(nn.Linear(4, 4), Slotted(4, 4), nn.Sequential(nn.BatchNorm1d(4)))
        layers, storages = list(model.modules()), weak(model)
        place.run(lambda: release_here(model))
        assert place.propagated == place.delivered
        assert torch.is_grad_enabled() and vars(torch)["_C"]._is_torch_function_enabled()
        release_here(model, *layers)
        assert gone(storages)
        for layer in layers:
            with pytest.raises(ReleasedError, match="was released"):
                layer(torch.ones(2, 4))

    interrupt_everywhere(check, package="torch_utils", minimum=30, at_most=150, deliver=send_sigint)


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
