"""release runs no code of the program but `close()` and destructors, and changes nothing else.

Neither when it understands, counts and gives up objects nor when it searches for holders.
"""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="assignment, attr-defined, call-arg, call-overload, metaclass"
# mypy: disable-error-code="method-assign, override, union-attr"

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_utils import release

ASKED: list[str] = []
KEPT: dict[str, Any] = {}
"""What a variable holds that is found in every version of Python: one of a module."""


def noting(name: str, answer: Callable[..., Any]) -> Any:
    def method(*args: Any, **kwargs: Any) -> Any:
        ASKED.append(name)
        return answer(*args, **kwargs)

    return method


class Meta(type):
    """Records every use of its classes."""

    __getattribute__ = noting("class attribute", type.__getattribute__)
    __eq__ = noting("class ==", lambda kind, other: kind is other)
    __hash__ = noting("class hash()", type.__hash__)


class TensorMeta(Meta, type(torch.Tensor)):  # type: ignore[misc]
    pass


class Curious:
    """Records every use of an instance."""

    __hash__ = noting("__hash__", lambda self: 1)
    __eq__ = noting("__eq__", lambda self, other: self is other)
    __len__ = noting("__len__", lambda self: 0)
    __repr__ = noting("__repr__", lambda self: "?")
    __iter__ = noting("__iter__", lambda self: iter(()))
    __getattr__ = noting("__getattr__", lambda self, name: None)
    __getattribute__ = noting("__getattribute__", object.__getattribute__)
    __class__ = property(noting("__class__", lambda self: dict))


class CuriousObject(Curious, metaclass=Meta):
    pass


class CuriousSlots(Curious, metaclass=Meta):
    __slots__ = ("model",)


class CuriousList(Curious, list, metaclass=Meta):
    pass


class CuriousDict(Curious, dict, metaclass=Meta):
    values = noting("values", lambda self: [])
    items = noting("items", lambda self: [])


class CuriousTensor(torch.Tensor, metaclass=TensorMeta):
    __getattribute__ = noting("__getattribute__", torch.Tensor.__getattribute__)
    __setattr__ = noting("__setattr__", torch.Tensor.__setattr__)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        ASKED.append(f"__torch_function__ {function}")
        return super().__torch_function__(function, types, args, kwargs or {})


class Layer(nn.Module, metaclass=Meta):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.others = CuriousDict(a=torch.ones(3), b=CuriousList([in_an_object(torch.ones(3))]))

    def close(self) -> None:
        pass


def in_an_object(thing: Any, kind: Any = CuriousObject) -> Any:
    holder = kind()
    object.__setattr__(holder, "model", thing)
    return holder


def in_slots(thing: Any) -> Any:
    return in_an_object(thing, CuriousSlots)


PLACES = {
    "object": in_an_object,
    "list": lambda tensor: CuriousList([tensor]),
    "dict": lambda tensor: CuriousDict(x=tensor),
    "slots": in_slots,
    "several": lambda tensor: in_an_object(CuriousDict(a=CuriousList([in_slots(tensor)]))),
    "tensor": lambda tensor: tensor.as_subclass(CuriousTensor),
}


def test_search_for_holders_runs_no_code_of_the_holder() -> None:
    tensors = [torch.ones(50 + number) for number in range(len(PLACES))]
    for (place, make), tensor in zip(PLACES.items(), tensors, strict=True):
        KEPT[place] = make(tensor.detach())  # Only it has this one, and its memory.
    ASKED.clear()
    report = release(*tensors)
    holders = [held.holders for held in report.still_held]
    KEPT.clear()
    assert ASKED == []
    assert len(holders) == len(PLACES)
    assert all(name.startswith("the variable 'KEPT' of module ") for (name,) in holders)


def test_release_runs_no_code_of_the_object() -> None:
    things = [make(torch.ones(50)) for make in PLACES.values()]
    things.append(nn.Sequential(Layer(), Layer()))
    for thing in things:
        ASKED.clear()
        assert release(thing).errors == ()
        assert ASKED == []
