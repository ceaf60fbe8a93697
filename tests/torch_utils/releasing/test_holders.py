"""Tests of the holders that a report names."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type"

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.releasing import gone, weak
from torch_utils import release

KEPT: dict[str, Any] = {}
VARIABLE = f"the variable 'KEPT' of module {__name__}"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    KEPT.clear()


class Cache:
    entry: Any = None


def in_another_module(weight: nn.Parameter) -> Any:
    live = nn.Linear(8, 8, bias=False)
    live.weight = weight
    return live


def in_an_object(weight: nn.Parameter) -> Any:
    cache = Cache()
    cache.entry = weight
    return cache


def in_a_closure(weight: nn.Parameter) -> Any:
    def embed() -> Any:
        return weight

    return embed


HOLDERS: dict[str, tuple[Callable[[nn.Parameter], Any], str]] = {
    "module": (in_another_module, "another module (Linear)"),
    "optimizer": (lambda w: torch.optim.SGD([w], lr=0.1), "an optimizer (SGD)"),
    "entry": (lambda w: w, VARIABLE),
    "container": (lambda w: {"weights": [w]}, VARIABLE),
    "object": (in_an_object, "a Cache"),
    "closure": (in_a_closure, "the function in_a_closure.<locals>.embed()"),
    "view": (lambda w: w.detach()[1:], VARIABLE),
}


@pytest.mark.xdist_group("optimizers")  # Their imports are slow.
def test_holders_are_named() -> None:
    model = nn.ModuleDict({kind: nn.Linear(8, 8, bias=False) for kind in HOLDERS})
    KEPT.update({kind: make(model[kind].weight) for kind, (make, _) in HOLDERS.items()})
    large, small = torch.ones(100), torch.ones(2)
    KEPT["large"], KEPT["small"] = in_an_object(large[1:]), small[1:]
    report = release(model, large, small)
    named = {h.what.split(".")[1]: h.holders for h in report.still_held if "." in h.what}
    assert named == {kind: (name,) for kind, (_, name) in HOLDERS.items()}
    first, *_, last = report.still_held
    assert (first.nbytes, last.nbytes) == (400, 8), "what a variable holds comes first in the text"
    assert f"held by {VARIABLE}; pass it too" in str(report)


def test_local_variables_are_named_or_guessed() -> None:
    """Before Python 3.13, reading them would keep them alive."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    my_layer = model[0]
    layers, ready, done = [my_layer], threading.Event(), threading.Event()

    def work() -> None:
        layer_of_thread = layers.pop()
        ready.set()
        done.wait()
        del layer_of_thread

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    (held,) = release(model).still_held
    done.set()
    thread.join()
    named = " and ".join(held.holders)
    if sys.version_info >= (3, 13):
        function = "test_local_variables_are_named_or_guessed"
        assert f"the variable 'my_layer' of {function}()" in named
        assert "the variable 'layer_of_thread' of work()" in named
    else:
        assert named == "probably a local variable of a running function"
    storages = weak(my_layer)
    del my_layer
    assert gone(storages), "the search keeps nothing alive"
