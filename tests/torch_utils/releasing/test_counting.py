"""What a release counts: all that a model holds, and with none of the program's code run."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from older_torch import needs_fast_notes
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torch_utils import release
from torch_utils._releasing import weak_storages
from torch_utils._releasing.storages import LENDER, Inventory
from torch_utils._releasing.tensors import empty_tensor

BYTES = 4_000_000

pytestmark = pytest.mark.xdist_group("transformers")  # Imported once, and by one worker only.


def big() -> torch.Tensor:
    return torch.ones(BYTES // 4)


class Slotted(nn.Module):
    __slots__ = ("kept",)


def in_slot() -> nn.Module:
    module = Slotted()
    module.kept = big()
    return module


def in_private_attribute() -> nn.Module:
    module = nn.Module()
    module._kept = big()
    return module


def in_cache() -> nn.Module:
    module = nn.Module()
    from transformers import DynamicCache

    module.cache = DynamicCache()
    module.cache.update(big().view(1, 1, 1000, -1), torch.ones(1, 1, 1, 1), 0)
    return module


def in_nested_containers() -> nn.Module:
    module = nn.Module()
    module.kept = OrderedDict(a=[({"b": big()},)])
    return module


def beside_lazy_layer() -> nn.Module:
    module = nn.Sequential(nn.LazyLinear(4), nn.Module())
    module[1].register_buffer("kept", big())
    return module


def in_unregistered_layer() -> nn.Module:
    module = nn.Module()
    module.hidden = [nn.Linear(1, BYTES // 4, bias=False)]
    return module


def in_attribute_of_a_parameter() -> nn.Module:
    module = nn.Linear(1, 1)
    module.weight.main_grad = big()
    return module


PLACES = [
    *(in_slot, in_private_attribute, in_cache, in_nested_containers, beside_lazy_layer),
    *(in_unregistered_layer, in_attribute_of_a_parameter),
]


@pytest.mark.parametrize("make", PLACES)
def test_freed_wherever_it_was(make: Any) -> None:
    """It goes, and the report counts it."""
    module = make()
    report = release(module)
    assert report.errors == ()
    assert 0 <= report.freed_bytes["host"] - BYTES < 1000
    assert report.still_held == ()


def test_still_held_wherever_it_was() -> None:
    """What a variable holds is not counted as freed."""
    module = in_cache()
    keys = module.cache.layers[0].keys
    report = release(module)
    assert report.still_held_bytes == keys.nbytes
    assert report.freed_bytes["host"] < 1000


def test_module_that_is_only_referred_to_is_no_survivor() -> None:
    """A child that knows its parent does not give the parent up."""
    parent = nn.Sequential(nn.Linear(100, 100), nn.Linear(2, 2))
    parent[1].parent = [parent]
    report = release(parent[1])
    assert report.still_held == ()
    assert report.freed_bytes == {"host": 24}


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/maps")
@pytest.mark.parametrize("make", [torch.from_numpy, lambda a: torch.frombuffer(a, dtype=a_type)])
def test_lent_memory_is_not_freed_while_it_lives(make: Any) -> None:
    """The storage goes, but the memory is the array's."""
    array = np.ones(10_000_000, np.float32)
    tensor = make(array)
    report = release(tensor)
    assert report.freed_bytes.get("host", 0) == 0
    assert [(held.nbytes, held.holders) for held in report.still_held] == [(40_000_000, (LENDER,))]
    assert array.sum() == 10_000_000
    # The control: this array is nobody else's, and its memory goes with the tensor.
    tensor = make(np.ones(10_000_000, np.float32))
    report = release(tensor)
    assert report.freed_bytes == {"host": 40_000_000}
    assert report.still_held == ()


a_type = torch.float32


class Spy:
    """What asks a release for anything."""

    calls: list[str] = []  # noqa: RUF012  (cleared by the test)


class SpyList(list):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        Spy.calls.append("__iter__")
        return super().__iter__()

    def __len__(self) -> int:
        Spy.calls.append("__len__")
        return super().__len__()


class SpyTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, *rest: Any, **more: Any) -> Any:
        Spy.calls.append(str(function))
        return super().__torch_function__(function, *rest, **more)


class Chameleon:
    @property
    def __class__(self) -> Any:
        Spy.calls.append("__class__")
        return type(self)

    def __getattribute__(self, name: str) -> Any:
        Spy.calls.append(name)
        return super().__getattribute__(name)


def test_counting_runs_nothing_of_the_program() -> None:
    """Neither a list's methods, nor a tensor's torch functions, nor properties, nor modes."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, kinds: Any, given: Any, named: Any) -> Any:
            Spy.calls.append(f"mode {function}")
            return function(*given, **(named or {}))

    module = nn.Linear(2, 2)
    module.spies = SpyList([big(), Chameleon()])
    module.spy = big().as_subclass(SpyTensor)
    tensor = big().as_subclass(SpyTensor)
    Spy.calls.clear()
    with Mode():
        report = release(module)
        empty_tensor(tensor)
    assert Spy.calls == []
    assert tensor.numel() == 0
    assert report.freed_bytes == {"host": 24 + 2 * BYTES}


def test_default_device_is_not_asked() -> None:
    """A released tensor stays on its device, whatever the program's default is."""
    tensor = big()
    with torch.device("meta"):
        assert release(tensor).freed_bytes == {"host": BYTES}
    assert tensor.device.type == "cpu"


@needs_fast_notes
def test_no_full_collection_and_no_burst_of_objects() -> None:
    """A model of many tensors costs no tracked object for each of them."""
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(2000))
    gc.collect()
    collected: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(info["generation"])

    gc.callbacks.append(note)
    try:
        report = release(model, trim_host=False)
    finally:
        gc.callbacks.remove(note)
    assert report.freed_bytes == {"host": 2000 * 24}
    assert len(collected) <= 4
    assert 2 not in collected


@pytest.mark.parametrize("lacks", ["_storage_address", "_storage_Use_Count"])
def test_without_the_private_calls(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that lacks them is slower, and counts the same."""
    monkeypatch.delattr(torch._C, lacks)
    monkeypatch.setattr(weak_storages, "_PROVEN", {})
    model = nn.Linear(10, 10)
    weight = model.weight
    report = release(model)
    assert not weak_storages._PROVEN["fast"]
    assert report.freed_bytes == {"host": 40}
    assert report.still_held_bytes == 400
    assert weight.numel() == 100


def test_weak_references_are_freed_once_whatever_happens() -> None:
    """An inventory that is dropped half way takes its weak references along, each once."""
    freed: list[int] = []
    inventory = Inventory()
    free = inventory._free
    inventory._free = lambda weak: (freed.append(weak), free(weak))
    tensors = [torch.ones(n + 1) for n in range(10)]
    for number, tensor in enumerate(tensors):
        inventory.add("", str(number), tensor)
    noted = list(inventory._own.weak)
    del tensors[5:], tensor
    inventory.forget_gone()
    assert sorted(freed) == sorted(noted[5:])
    other = Inventory()
    other.absorb(inventory)
    del inventory
    assert len(freed) == 5
    assert len(other.alive()) == 5
    assert other.freed_bytes() == {"host": 4 * sum(range(6, 11))}


@needs_fast_notes
def test_noting_makes_no_object_of_a_storage() -> None:
    """The count of its owners is what it was."""
    tensor = big()
    key = torch._C._storage_address(tensor)
    inventory = Inventory()
    inventory.add("", "tensor", tensor)
    assert torch._C._storage_Use_Count(key) == 1
    tensor.untyped_storage()
    assert torch._C._storage_Use_Count(key) == 2  # The control.


def test_wrapper_lets_go_of_its_inner_tensors() -> None:
    """What a tensor has in its attributes goes with it."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, inner: torch.Tensor) -> Any:
            wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            wrapper.inner = inner
            return wrapper

        @classmethod
        def __torch_dispatch__(cls, *call: Any, **more: Any) -> Any:
            raise AssertionError("the program's own code was run")

    tensor = Wrapper(big())
    inner = StorageWeakRef(tensor.inner.untyped_storage())
    assert release(tensor).freed_bytes == {"host": BYTES}
    assert inner.expired()


def test_loss_lets_go_of_its_graph() -> None:
    """All that the backward pass would have needed goes."""
    weight = big().requires_grad_()
    inner = weight * 2
    saved = StorageWeakRef(inner.untyped_storage())
    loss = (inner * inner).sum()
    del inner
    release(loss)
    assert saved.expired()
    assert weight.sum() == BYTES // 4


def test_view_lets_go_of_its_base() -> None:
    """The view was the last to hold it."""
    base = big()
    storage = StorageWeakRef(base.untyped_storage())
    view = base[:1]
    del base
    assert release(view).freed_bytes == {"host": BYTES}
    assert storage.expired()


def test_torch_that_cannot_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor is left whole, and the report says so."""
    monkeypatch.delattr(torch._C, "_swap_tensor_impl")
    tensor = big()
    report = release(tensor)
    assert [type(error) for error in report.errors] == [RuntimeError]
    assert "left whole" in str(report.errors[0])
    assert report.still_held_bytes == BYTES
    assert tensor.sum() == BYTES // 4


@pytest.mark.filterwarnings("error")
def test_tensor_of_a_graph_as_buffer() -> None:
    """Asking it for a gradient that it cannot have would warn."""
    module = nn.Module()
    module.register_buffer("pending", big().requires_grad_() * 2)
    kept = big().requires_grad_() * 2
    kept.retain_grad()
    kept.sum().backward()
    module.register_buffer("kept", kept)
    del kept
    assert release(module).freed_bytes == {"host": 3 * BYTES}
