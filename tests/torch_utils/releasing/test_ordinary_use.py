"""Tests of releases in ordinary programs: services, training loops, stores of vectors."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.releasing import without_collector
from torch_utils import SafePyTorchCleanup, release

INPUTS = torch.ones(1, 4)


def test_object_is_left_to_the_thread_that_closes_it() -> None:
    class Service:
        def __init__(self) -> None:
            self.model = nn.Linear(4, 4)
            self.answers: list[torch.Tensor] = []

        def close(self) -> None:
            closing.set()
            released.wait()
            self.answers.append(self.model(INPUTS))

    closing, released, service = threading.Event(), threading.Event(), Service()
    answers = service.answers
    thread = threading.Thread(target=release, args=(service,))
    thread.start()
    closing.wait()
    try:
        assert release(service).errors == ()
    finally:
        released.set()
        thread.join()
    assert len(answers) == 1


@pytest.mark.parametrize("first", ["optimizer", "model"])
def test_scope_reports_weights_that_stay(first: str) -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    kept = model.state_dict()
    with SafePyTorchCleanup() as scope:
        things: list[Any] = [model, optimizer]  # The newest is released first.
        for thing in things if first == "optimizer" else things[::-1]:
            scope.manage(thing)
    assert scope.report is not None
    assert [held.nbytes for held in scope.report.still_held] == [64]
    assert kept["weight"].shape == (4, 4)


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.mark.parametrize("iterate", [itertools.cycle, iter, lambda ms: map(nn.Module.train, ms)])
def test_iterator_of_a_live_object_uses_its_models(iterate: Any) -> None:
    model = nn.Linear(4, 4)
    live = Holder(iterate([model]))
    release(Holder(model))
    assert next(live.held)(INPUTS).shape == (1, 4)


def test_view_needs_no_full_collection() -> None:
    data = torch.ones(64, 4)
    release(data[:32])
    collections = gc.get_stats()[2]["collections"]
    with without_collector():
        release(data[:32])
    assert gc.get_stats()[2]["collections"] == collections
    assert data.sum() == 256


def test_tensor_that_retains_its_gradient_is_refused_with_advice() -> None:
    activations = nn.Linear(4, 4)(INPUTS)
    activations.retain_grad()
    activations.sum().backward()
    (error,) = release(activations).errors
    assert "retain_grad() was called on it; use `del`" in str(error)
    assert activations.grad is None
