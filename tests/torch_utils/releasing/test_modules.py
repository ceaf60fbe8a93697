"""Tests of the use and the inspection of released modules."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, operator"

import copy
import inspect
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest
import rich
import rich.pretty
import torch
from torch import nn

from torch_utils import ReleasedError, release

pytestmark = pytest.mark.usefixtures("frozen_heap")


def released() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    release(model)
    return model


INPUTS = torch.ones(1, 4)
ATTRIBUTE_USES: list[Callable[[Any], Any]] = [
    lambda m: m.weight,
    lambda m: setattr(m, "x", 1),
    lambda m: delattr(m, "x"),
    lambda m: m.state_dict(),
    lambda m: m.encode("text"),
]
OTHER_USES: list[Callable[[Any], Any]] = [
    lambda m: m(INPUTS),
    len,
    lambda m: m[0],
    lambda m: m < 1,
    lambda m: m + 1,
    lambda m: 1 - m,
    list,
    copy.deepcopy,
    copy.copy,
    pickle.dumps,
]


def test_error_names_the_thread_if_no_line_of_the_program_began_the_release() -> None:
    model = nn.Linear(4, 4)
    thread = threading.Thread(target=release, args=(model,), name="idle models")
    thread.start()
    thread.join()
    with pytest.raises(ReleasedError, match="released in the thread 'idle models', so"):
        model(torch.ones(4))


def test_every_use_of_a_released_module_raises_released_error() -> None:
    says = rf"this Sequential was released at .*{Path(__file__).name}"
    for use in (*ATTRIBUTE_USES, *OTHER_USES):
        with pytest.raises(ReleasedError, match=says) as caught:
            use(released())
        assert isinstance(caught.value, AttributeError) == (use in ATTRIBUTE_USES)
        assert getattr(caught.value, "name", None) is None, "Python would suggest another attribute"


@runtime_checkable
class Encoder(Protocol):
    name: str

    def encode(self, text: str) -> list[float]: ...


LOOKS: list[Callable[[Any], Any]] = [
    bool,
    callable,
    dir,
    vars,
    inspect.getmembers,
    inspect.signature,
    repr,
    lambda m: rich.print(m, {"model": m}, file=io.StringIO()),
    lambda m: getattr(m, "_repr_html_", None),
    np.asarray,
    lambda m: {m: 1},
    lambda m: weakref.WeakKeyDictionary({m: 1}),
]


def test_introspection_of_a_released_module_finds_no_attributes_and_does_not_raise() -> None:
    model = released()
    for look in LOOKS:
        look(model)
    assert model
    assert model == model
    assert len({model}) == 1
    assert not hasattr(model, "weight")
    assert getattr(model, "weight", 3) == 3
    assert not isinstance(model, Encoder)
    assert isinstance(model, nn.Sequential)
    assert model.__module__ == nn.Sequential.__module__
    assert rich.pretty.pretty_repr([model]) == "[<released this Sequential>]"
    assert str(model) == repr(model) == "<released this Sequential>"
    assert all(hasattr(model, name) for name in dir(model))


PARENTS = {
    "call": lambda m: m(torch.ones(1, 4)),
    "parameters": lambda m: list(m.parameters()),
    "state_dict": lambda m: m.state_dict(),
    "load": lambda m: m.load_state_dict({}),
}


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x)


@pytest.mark.parametrize("use", PARENTS)
def test_parent_of_a_released_child_raises_the_childs_error(use: str) -> None:
    parent = Parent()
    PARENTS[use](Parent()) if use != "load" else None
    release(parent.child)
    with pytest.raises(ReleasedError, match="this Linear was released at"):
        PARENTS[use](parent)
    assert "released this Linear" in repr(parent)
    parent.child = nn.Linear(4, 4)
    assert parent(torch.ones(1, 4)).shape == (1, 4)
