"""Tests of the kinds of objects that release supports, skips and refuses."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, misc"

from __future__ import annotations

import collections
import dataclasses
import enum
import multiprocessing
import pathlib
import sys
import threading
import types
import typing
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from support.programs import TIMEOUT_S
from support.releasing import gone, weak
from torch_utils import ReleasedError, Resource, SafePyTorchCleanup, release


def layer() -> nn.Linear:
    return nn.Linear(8, 8)


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    rate: float = 0.1
    name: str = "adam"


Point = collections.namedtuple("Point", "x y")

LEAVES = {
    "path": pathlib.Path("x"),
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "generator": torch.Generator(),
    "enum": Colour.RED,
    "function": layer,
    "class": Settings,
    "module": typing,
    "numpy array": np.ones(3),
    "lock": threading.Lock(),
    "weakref": weakref.ref(Settings),
    "error": ValueError("x"),
    "record": Settings(),
    "namespace": types.SimpleNamespace(a=1),
    "namedtuple": Point(1, "y"),
    "stdout": sys.stdout,
}


@pytest.mark.parametrize("kind", LEAVES)
def test_leaf_in_a_container_is_skipped(kind: str) -> None:
    tensor = torch.ones(100)
    storages = weak(tensor)
    leaf = LEAVES[kind]
    batch: Any = {"ids": tensor, "leaf": leaf}
    batch = [{"a": (batch, collections.deque([leaf])), "leaf": types.SimpleNamespace(x=[leaf])}]
    assert release(batch).errors == ()
    assert gone(storages)
    assert not sys.stdout.closed


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("path", "cannot release a pathlib."),
        ("device", "cannot release a torch.device. Pass its models or tensors, or give it a close"),
        ("generator", "cannot release a torch._C.Generator. "),
        ("numpy array", "use `del`"),
        ("class", "pass an instance"),
    ],
)
def test_leaf_as_an_argument_is_refused(kind: str, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        release(LEAVES[kind])


@dataclasses.dataclass
class Bundle:
    model: Any
    others: Any = None


class Holder:
    def __init__(self, model: Any) -> None:
        self.model = model


class Slotted:
    __slots__ = ("__weakref__", "_model")

    def __init__(self, model: Any) -> None:
        self._model = model


class OwnMapping(collections.abc.Mapping):
    """A mapping with methods of the program."""

    def __init__(self, model: Any) -> None:
        self._items = {"a": model}

    def __getitem__(self, key: str) -> Any:
        raise AssertionError("ran the program's code")

    __len__ = __iter__ = __getitem__  # type: ignore[assignment]


class Property:
    @property
    def model(self) -> Any:
        raise AssertionError("ran the program's code")


def dict_key(model: Any) -> Any:
    return {model: "name"}


HOLDERS: dict[str, Any] = {
    "dataclass": Bundle,
    "namedtuple": lambda m: Point(1, m),
    "namespace": lambda m: types.SimpleNamespace(m=m),
    "object": Holder,
    "slots": Slotted,
    "mapping": OwnMapping,
    "user dict": lambda m: collections.UserDict(a=m),
    "ordered dict": lambda m: collections.OrderedDict(a=m),
    "proxy": lambda m: types.MappingProxyType({"a": m}),
    "values": lambda m: {"a": m}.values(),
    "key": dict_key,
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_object_that_holds_a_model_is_released_for_it(kind: str) -> None:
    model = layer()
    storages = weak(model)
    holder = HOLDERS[kind](model)
    assert release(holder).errors == ()
    assert gone(storages)
    with pytest.raises(ReleasedError):
        model(torch.ones(1, 8))
    assert release([holder], model).errors == ()


class Empty:
    pass


class Proxy:
    """Finds its target by running code."""

    _known: ClassVar[dict[int, Any]] = {}

    def __init__(self, thing: Any) -> None:
        self._known[id(self)] = thing

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("ran the program's code")


class Awaited:
    async def close(self) -> None: ...


def generator(model: nn.Module) -> Any:
    yield from model.parameters()


REFUSED = {
    "generator": (generator, r"pass list\(...\) of it, or the model itself"),
    "named": (lambda m: {"p": m.named_parameters()}, "cannot release a builtins.generator"),
    "iterator": (lambda m: iter([m]), "read only once"),
    "in a namespace": (lambda m: types.SimpleNamespace(p=iter([m])), "types.SimpleNamespace"),
    "empty object": (lambda m: [Empty()], "Empty. Pass its models or tensors, or give it a close"),
    "proxy": (lambda m: Proxy(m.weight), "may be a proxy: pass the object behind it"),
    "plain object": (lambda m: object(), "cannot release a builtins.object. Pass its models"),
    "object in an object": (lambda m: Bundle(Holder(m)), "Pass Bundle.model, a Holder that is"),
    "property": (lambda m: Property(), "Pass Property.model"),
    "storage": (lambda m: m.weight.untyped_storage(), "Pass the tensor"),
    "awaited": (lambda m: Awaited(), "has to be awaited"),
    "class": (lambda m: nn.Linear, "pass an instance"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_object_is_refused_before_any_change(kind: str) -> None:
    """The message says what to pass instead."""
    model = layer()
    make, message = REFUSED[kind]
    with pytest.raises(TypeError, match=f"{message}.*Nothing was changed"):
        release(model, make(model))
    assert model(torch.ones(1, 8)).shape == (1, 8)


@pytest.mark.parametrize("other", [object(), Empty(), Property(), torch.device("cpu")])
def test_unknown_object_beside_a_model_is_skipped(other: Any) -> None:
    for make in (lambda m: (m, other), lambda m: {"a": other, "b": m}, lambda m: [[other], [m]]):
        model = layer()
        storages = weak(model)
        assert release(make(model)).errors == ()
        assert gone(storages)


def test_dictionary_keys_may_be_any_object() -> None:
    tensor = torch.ones(3)
    release({Empty(): tensor, (1, 2): None, Colour.RED: 1})
    assert tensor.numel() == 0


def test_deep_nesting_and_cycles_are_released() -> None:
    tensor = torch.ones(1)
    nested: Any = tensor
    for _ in range(10_000):
        nested = [nested]
    spaces: Any = torch.ones(1)
    for _ in range(10_000):
        spaces = types.SimpleNamespace(inner=spaces)
    cycle: list[Any] = [nested, spaces]
    cycle.append({"again": cycle})
    report = release(cycle)
    assert tensor.numel() == 0
    assert report.freed_bytes == {"host": 8}
    many = [torch.ones(1) for _ in range(20_000)]
    assert release(many, collect="never").freed_bytes == {"host": 80_000}
    assert all(t.numel() == 0 for t in many)


def test_resources_in_attributes_are_closed_but_files_are_not() -> None:
    class Handle(Resource):
        def _release(self) -> None:
            closed.append(1)

    class File:
        is_open = True

        def close(self) -> None:
            self.is_open = False

    closed: list[int] = []
    shared, file = Handle(), File()
    holder = Holder(layer())
    holder.handle, holder.shared, holder.file = Handle(), shared, file
    release(holder)
    assert closed == [1]
    assert file.is_open
    assert shared.close()  # The variable may be the program's: it stays open.
    release([file])
    assert not file.is_open


def test_close_attribute_of_an_instance_is_called() -> None:
    from unittest.mock import MagicMock

    closed: list[int] = []
    mock = MagicMock()
    mock.close = MagicMock()
    release([types.SimpleNamespace(close=lambda: closed.append(1)), mock])
    assert closed == [1]
    assert mock.close.call_count == 1


def test_object_whose_model_is_not_loaded_is_accepted() -> None:
    assert release(Holder(None)).errors == ()
    with SafePyTorchCleanup(Holder(None)) as scope:
        pass
    assert scope.report is not None and scope.report.errors == ()


def test_objects_in_an_object_are_reported_as_held() -> None:
    inner = Holder(layer())
    report = release(Bundle(layer(), inner))
    assert report.freed_bytes == {"host": 288}
    assert [held.what for held in report.still_held] == [
        "Bundle.others.model.weight",
        "Bundle.others.model.bias",
    ]
    assert inner.model(torch.ones(1, 8)).shape == (1, 8)


def test_schedulers_scalers_and_loaders_drop_their_references() -> None:
    model = layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    data = torch.ones(4, 2)
    loader = DataLoader(TensorDataset(data))
    release(scheduler, plateau, scaler, {"loader": loader})
    optimizer.step()
    assert data.sum() == 8
    for thing in (scheduler, plateau, scaler, loader):
        for use in (lambda s: s.step(), lambda s: s.state_dict()):
            with pytest.raises(ReleasedError, match=f"this {thing.__class__.__name__} was"):
                use(thing)
    with pytest.raises(ReleasedError):
        iter(loader)


def test_workers_of_a_loader_end_with_its_release() -> None:
    before = {*multiprocessing.active_children()}
    loader = DataLoader(
        TensorDataset(torch.ones(4, 2)),
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    )
    next(iter(loader))
    (worker,) = {*multiprocessing.active_children()} - before
    assert worker.is_alive()
    release(loader)
    worker.join(TIMEOUT_S)
    assert worker.exitcode == 0


@pytest.mark.slow
def test_accelerator_is_released_with_its_objects() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = layer()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(TensorDataset(torch.ones(2)))
    )
    model(torch.ones(1, 8)).sum().backward()
    prepared[1].step()
    storages = weak(model, optimizer.state[model.weight]["exp_avg"])
    assert release(accelerator).errors == ()
    assert gone(storages)
    with pytest.raises(ReleasedError, match="this Adam was released"):
        optimizer.step()


def test_released_loader_leaves_what_it_shares_intact() -> None:
    data = TensorDataset(torch.arange(40.0))
    batches = torch.utils.data.BatchSampler(range(40), 4, drop_last=False)
    ours, other = (DataLoader(data, batch_sampler=batches) for _ in range(2))
    iterator = iter(other)
    next(iterator)
    release(ours)
    assert len(list(iterator)) == 9
    assert len(list(other)) == 10
