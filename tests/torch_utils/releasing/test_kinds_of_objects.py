"""Tests of the kinds of objects that release supports, skips and refuses."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, misc"

import collections
import dataclasses
import functools
import logging
import multiprocessing
import pathlib
import sys
import threading
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.programs import TIMEOUT_S
from tests.support.releasing import garbage_collections, gone, weak, without_collector
from torch_utils import ReleasedError, Resource, release

pytestmark = pytest.mark.usefixtures("frozen_heap")


def layer() -> nn.Linear:
    return nn.Linear(8, 8)


@dataclasses.dataclass
class Settings:
    rate: float = 0.1


Point = collections.namedtuple("Point", "x y")

LEAVES: list[Any] = [
    *(torch.Generator(), layer, Settings, typing, np.ones(3), threading.Lock()),
    *(ValueError("x"), Settings(), Point(1, "y"), sys.stdout),
]


class Holder:
    def __init__(self, model: Any) -> None:
        self.model = model


class Layers(list[Any]):
    """A container with an attribute."""

    def __init__(self, model: Any) -> None:
        self.model = model


CONTAINERS: list[Callable[[Any], Any]] = [
    lambda m: Point(1, m),
    lambda m: collections.OrderedDict(a=m),
    lambda m: {m: "name"},
    lambda m: [{"a": (collections.deque([m]), {"b"})}],
]


def test_what_stands_in_a_container_is_emptied_and_leaves_are_skipped() -> None:
    models = [layer() for _ in CONTAINERS]
    storages = weak(*models)
    leaves = {"a": (LEAVES, collections.deque(LEAVES)), "b": types.SimpleNamespace(x=LEAVES)}
    containers = [make(model) for make, model in zip(CONTAINERS, models, strict=True)]
    assert release(*containers, leaves).errors == ()
    assert gone(storages)
    assert not sys.stdout.closed
    for model in models:
        with pytest.raises(ReleasedError):
            model(torch.ones(1, 8))
    assert release(containers, models).errors == ()


HOLDERS: dict[str, Any] = {
    "list": Layers,
    "user dict": lambda m: collections.UserDict(a=m),
    "deep": lambda m: Holder({"engine": Holder([Holder(m)])}),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_object_loses_its_model_however_deep_it_lies(kind: str) -> None:
    model = layer()
    holder = HOLDERS[kind](model)
    storages = weak(model)
    report = release(holder)
    assert model(torch.ones(1, 8)).shape == (1, 8)
    assert (report.freed_bytes, report.still_held_bytes) == ({"host": 0}, 288)
    for use in (lambda: holder.model, lambda: holder["a"]):
        with pytest.raises((ReleasedError, AttributeError, TypeError)):
            use()
    del model, report
    assert gone(storages)


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: m.parameters(), r"pass list\(...\) of it, or the model itself"),
    (lambda m: np.ones(3), "use `del`"),
    (lambda m: iter([m]), "read only once"),
    (lambda m: nn.Linear, "pass an instance"),
    (lambda m: layer, r"load\(\) instead of load"),
    (lambda m: functools.partial(m), "pass what it returns"),
    (lambda m: np, "pass the models in it"),
    (lambda m: logging.getLogger("x"), "cannot release a logging.Logger"),
    (lambda m: threading.Lock(), "cannot release a _thread.lock"),
    (lambda m: threading.Thread(target=m), "Thread. Pass its models"),
    (lambda m: Settings(), "Settings. Pass its models or tensors, or give it a close"),
]


def test_unsupported_objects_are_refused_before_any_change() -> None:
    """The message says what to pass instead."""
    model = layer()
    index = pytest.importorskip("faiss").IndexFlatIP(8)
    index.add(np.ones((100, 8), np.float32))
    for make, message in [*REFUSED, (lambda m: index, "reset")]:
        with pytest.raises(TypeError, match=f"{message}.*Nothing was changed"):
            release(model, make(model))
    assert model(torch.ones(1, 8)).shape == (1, 8)


def test_deep_nesting_and_cycles_are_released() -> None:
    tensor = torch.ones(1)
    nested, spaces = list[Any]([tensor]), types.SimpleNamespace(inner=torch.ones(1))
    for _ in range(5_000):
        nested, spaces = [nested], types.SimpleNamespace(inner=spaces)
    cycle: list[Any] = [nested, spaces]
    cycle.append({"again": cycle})
    assert release(cycle).freed_bytes == {"host": 8}
    assert tensor.numel() == 0


def test_parts_end_by_their_own_destructors() -> None:
    """Those that nothing else refers to; without a warning, because the release is their end."""

    class Handle(Resource):
        def _release(self) -> None:
            closed.append(1)

    closed: list[int] = []
    shared = Handle()
    holder = Holder(layer())
    holder.handle, holder.shared = Handle(), shared
    assert release(holder).errors == ()
    assert closed == [1]
    assert shared.close()


def test_object_with_close_and_without_memory_is_closed_and_stays(tmp_path: pathlib.Path) -> None:
    class Connection(Resource):
        def _release(self) -> None:
            self.is_open = False

    connection, file = Connection(), (tmp_path / "a").open("w")
    closed: list[int] = []
    own = types.SimpleNamespace(close=lambda: closed.append(1))
    release(connection, [file, own])
    assert closed == [1]
    assert (connection.closed, connection.is_open, file.closed) == (True, False, True)
    assert "Connection" in repr(connection)


@pytest.mark.xdist_group("optimizers")  # Their imports are slow.
def test_training_objects_drop_their_references_and_leave_out_what_others_own() -> None:
    model, inputs, data = layer(), torch.ones(1, 8), torch.ones(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(TensorDataset(data))
    release(scheduler, plateau, scaler, {"loader": loader})
    model(inputs).sum().backward()
    optimizer.step()
    expected = model(inputs)
    with without_collector(), garbage_collections() as generations:
        report = release(optimizer)
    # The gradients stay with the model; Adam's two copies and its steps are freed.
    assert (report.freed_bytes, report.still_held) == ({"host": 2 * 288 + 2 * 4}, ())
    assert generations == []
    assert torch.equal(model(inputs), expected)
    assert data.sum() == 8
    for thing in (scheduler, plateau, scaler, loader, optimizer):
        for use in (lambda s: s.step(), lambda s: s.state_dict()):
            with pytest.raises(ReleasedError, match=f"this {thing.__class__.__name__} was"):
                use(thing)
    with pytest.raises(ReleasedError):
        iter(loader)


def loader_and_iterator(**options: Any) -> tuple[Any, Any, Any]:
    """Return a `DataLoader`, its iterator, and its worker."""
    before = {*multiprocessing.active_children()}
    data = TensorDataset(torch.ones(4, 2))
    loader = DataLoader(data, num_workers=1, multiprocessing_context="forkserver", **options)
    iterator = iter(loader)
    next(iterator)
    (worker,) = {*multiprocessing.active_children()} - before
    return loader, iterator, worker


@pytest.mark.slow  # Its worker imports torch.
def test_workers_of_a_loader_end_with_its_release() -> None:
    loader, iterator, worker = loader_and_iterator(persistent_workers=True)
    del iterator
    release(loader)
    worker.join(TIMEOUT_S)
    assert worker.exitcode == 0


@pytest.mark.slow  # Its worker imports torch.
def test_iterator_of_a_loader_is_named_or_ended() -> None:
    """Its workers go on as long as a variable refers to it."""
    loader, iterator, worker = loader_and_iterator()
    (held,) = release(loader).still_held
    assert (held.what, held.nbytes) == ("an iterator of the DataLoader, with 1 workers", 0)
    assert any("the variable 'iterator' of " in name for name in held.holders)
    assert worker.is_alive()
    assert release(iterator).errors == ()
    worker.join(TIMEOUT_S)
    assert worker.exitcode == 0
    with pytest.raises(ReleasedError):
        next(iterator)
