"""Classes and metaclasses of the program's are asked for nothing: no equality, hash, or name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from torch_utils import SafePyTorchCleanup, release
from torch_utils._releasing.classes import ByClass, is_among
from torch_utils._releasing.reading import Kinds

ASKED: list[str] = []


class Curious(type):
    """Notes what its classes are asked."""

    def __getattribute__(cls, name: str) -> Any:
        ASKED.append(name)
        return type.__getattribute__(cls, name)

    def __eq__(cls, other: object) -> bool:
        ASKED.append("==")
        return cls is other

    def __hash__(cls) -> int:
        ASKED.append("hash()")
        return type.__hash__(cls)

    def __instancecheck__(cls, thing: object) -> bool:
        ASKED.append("isinstance()")
        return type.__instancecheck__(cls, thing)

    def __subclasscheck__(cls, kind: type) -> bool:
        ASKED.append("issubclass()")
        return type.__subclasscheck__(cls, kind)


class CuriousTensorType(Curious, type(torch.Tensor)):  # type: ignore[misc]
    pass


class Holder(metaclass=Curious):
    def __init__(self, model: Any) -> None:
        self.model = model


class Slotted(metaclass=Curious):
    __slots__ = ("model",)

    def __init__(self, model: Any) -> None:
        self.model = model


class Dictionary(dict, metaclass=Curious):  # type: ignore[type-arg]
    pass


class Sequence(list, metaclass=Curious):  # type: ignore[type-arg]
    pass


class Tensor(torch.Tensor, metaclass=CuriousTensorType):
    pass


class Layer(nn.Module, metaclass=Curious):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.others = Dictionary(a=torch.ones(3), b=Sequence([Holder(torch.ones(3))]))

    def close(self) -> None:
        pass


class LayerWithSlots(nn.Module, metaclass=Curious):
    __slots__ = ("own",)


class Closing(metaclass=Curious):
    def close(self) -> None:
        pass


class Optimizer(torch.optim.SGD, metaclass=Curious):
    pass


def shared() -> list[Any]:
    """Make a model of which another one, behind it, has a part."""
    model = nn.Sequential(Layer(), nn.Linear(2, 2))
    return [model, Holder(model[0]), LayerWithSlots()]


CASES: dict[str, Callable[[], Any]] = {
    "holder": lambda: Holder(nn.Linear(2, 2)),
    "slots": lambda: Slotted(nn.Linear(2, 2)),
    "dictionary": lambda: Dictionary(a=torch.ones(3)),
    "list": lambda: Sequence([torch.ones(3)]),
    "tensor": lambda: torch.ones(3).as_subclass(Tensor),
    "modules": lambda: nn.Sequential(Layer(), LayerWithSlots()),
    "shared": shared,
    "closing": Closing,
    "optimizer": lambda: Optimizer([nn.Parameter(torch.ones(3))], lr=0.1),
}


@pytest.mark.parametrize("name", CASES)
def test_classes_are_asked_nothing(name: str) -> None:
    """By `release`, which understands, counts, gives up and searches; and by a scope."""
    thing = CASES[name]()
    with SafePyTorchCleanup() as scope:
        ASKED.clear()
        scope.manage(thing)
    assert ASKED == []
    assert scope.report is not None
    assert scope.report.errors == ()


def test_what_holds_a_survivor_is_asked_nothing() -> None:
    """The search for it goes through objects of all these classes."""
    tensor = torch.ones(3)
    held = Holder(Dictionary(a=Sequence([Slotted(tensor.view(-1))])))
    ASKED.clear()
    report = release(tensor, search_s=60)
    assert ASKED == []
    assert report.still_held[0].holders == ("a Slotted",)
    ASKED.clear()
    with pytest.raises(TypeError, match="does not know how to give up Holder"):
        release(Holder(held))
    assert ASKED == []


def test_control_the_usual_ways_ask() -> None:
    """Comparing, hashing and naming a class are its metaclass's business."""
    ASKED.clear()
    assert Holder not in (int, str)
    assert {Holder: 1}[Holder] == 1
    assert Holder.__name__ == "Holder"
    assert {"==", "hash()", "__name__"} <= {*ASKED}
    ASKED.clear()
    assert not is_among(Holder, (int, str))
    assert is_among(Holder, (int, Holder))
    assert ByClass(lambda kind: kind is Holder)(Holder)
    assert ASKED == []


class OwnAttributes(torch.Tensor):
    """Has a say in every attribute that is read or set."""

    def __getattribute__(self, name: str) -> Any:
        ASKED.append(name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        ASKED.append(f"{name} =")
        super().__setattr__(name, value)


def test_tensors_attributes_are_not_asked() -> None:
    """What a tensor is, and its hooks, are read and dropped by torch's own accessors."""
    tensor = torch.ones(3).as_subclass(OwnAttributes)
    tensor.note = torch.ones(5)
    ASKED.clear()
    assert release(tensor).freed_bytes == {"host": 32}
    assert ASKED == []
    assert tensor.shape == (0,)
    assert "shape" in ASKED  # It does notice.


class CuriousArray(np.ndarray):
    """Notes whenever numpy tells it of a view or a copy."""

    def __array_finalize__(self, array: Any) -> None:
        ASKED.append("__array_finalize__")


def test_arrays_are_not_asked() -> None:
    """The items of an array of objects are read without a word to its class."""
    array = np.empty((2, 2), dtype=object).view(CuriousArray)
    array[0, 1] = tensor = torch.ones(3)
    ASKED.clear()
    assert release(array).freed_bytes == {"host": 12}
    assert ASKED == []
    assert tensor.shape == (0,)
    array.flatten()
    assert ASKED  # It does notice.


def test_what_was_found_out_goes_without_a_collection() -> None:
    """It refers to the program's classes: a circle would keep those until somebody collects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        kinds = Kinds(torch)
        kinds.of(torch.Tensor)
        gone = weakref.ref(kinds)
        del kinds
        assert gone() is None
    finally:
        if was_enabled:
            gc.enable()
