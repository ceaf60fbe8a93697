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
INPUTS = torch.ones(1, 4)
ATTRIBUTE_USES: list[Callable[[Any], Any]] = [
    lambda m: m.weight,
    lambda m: setattr(m, "x", 1),
    lambda m: delattr(m, "x"),
    lambda m: m.state_dict(),
    lambda m: m.encode("text"),
]
OTHER_USES: list[Callable[[Any], Any]] = [
    *(len, list, copy.deepcopy, copy.copy, pickle.dumps),
    lambda m: m(INPUTS),
    lambda m: m[0],
    lambda m: m < 1,
    lambda m: m + 1,
    lambda m: 1 - m,
]


def released() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    release(model)
    return model


def test_error_names_the_thread_if_no_line_of_the_program_began_the_release() -> None:
    model = nn.Linear(4, 4)
    thread = threading.Thread(target=release, args=(model,), name="idle models")
    thread.start()
    thread.join()
    with pytest.raises(ReleasedError, match="released in the thread 'idle models', so"):
        model(INPUTS)


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
    *(bool, callable, vars, inspect.getmembers, inspect.signature, np.asarray),
    lambda m: rich.print(m, {"model": m}, file=io.StringIO()),
    lambda m: weakref.WeakKeyDictionary({m: 1}),
]


def test_introspection_of_a_released_module_finds_no_attributes_and_does_not_raise() -> None:
    model = released()
    for look in LOOKS:
        look(model)
    assert model == model
    assert len({model}) == 1
    assert not hasattr(model, "weight")
    assert not isinstance(model, Encoder)
    assert isinstance(model, nn.Sequential)
    assert model.__module__ == nn.Sequential.__module__
    assert rich.pretty.pretty_repr([model]) == "[<released this Sequential>]"
    assert str(model) == repr(model) == "<released this Sequential>"
    assert all(hasattr(model, name) for name in dir(model))


PARENT_USES: list[Callable[[Any], Any]] = [
    lambda m: m(INPUTS),
    lambda m: list(m.parameters()),
    lambda m: m.state_dict(),
    lambda m: m.load_state_dict({}),
]


def test_parent_of_a_released_child_raises_the_childs_error() -> None:
    for use in PARENT_USES:
        parent = nn.Sequential(nn.Linear(4, 4))
        release(parent[0])
        with pytest.raises(ReleasedError, match="this Linear was released at"):
            use(parent)
        assert "released this Linear" in repr(parent)
        parent[0] = nn.Linear(4, 4)
        assert parent(INPUTS).shape == (1, 4)
