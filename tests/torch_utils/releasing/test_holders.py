"""Tests of the holders that a report names."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type"

import contextvars
import functools
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.releasing import gone, weak, without_collector
from torch_utils import release

KEPT: dict[str, Any] = {}
OTHER: dict[str, Any] = {}
VARIABLE = f"the variable 'KEPT' of module {__name__}"
CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("current_model")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    KEPT.clear()
    OTHER.clear()


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
    "module": (in_another_module, f"{VARIABLE}: KEPT['module'].weight, another module (Linear)"),
    "optimizer": (
        lambda w: torch.optim.SGD([w], lr=0.1),
        f"{VARIABLE}: KEPT['optimizer'], an optimizer (SGD)",
    ),
    "entry": (lambda w: w, f"{VARIABLE}: KEPT['entry']"),
    "container": (lambda w: {"weights": [w]}, f"{VARIABLE}: KEPT['container']['weights'][0]"),
    "object": (in_an_object, f"{VARIABLE}: KEPT['object'].entry"),
    "view": (lambda w: w.detach()[1:], f"{VARIABLE}: KEPT['view']"),
    "graph": (
        lambda w: (w * w).sum(),
        f"the autograd graph or a view of {VARIABLE}: KEPT['graph']",
    ),
}


@pytest.mark.xdist_group("optimizers")  # Their imports are slow.
def test_holders_are_named() -> None:
    model = nn.ModuleDict({kind: nn.Linear(8, 8, bias=False) for kind in (*HOLDERS, "other")})
    KEPT.update({kind: make(model[kind].weight) for kind, (make, _) in HOLDERS.items()})
    OTHER["other"] = model["other"].weight
    large, small = torch.ones(100), torch.ones(2)
    KEPT["large"], KEPT["small"] = in_an_object(large[1:]), small[1:]
    report = release(model, large, small)
    named = {h.what.split(".")[1]: h.holders for h in report.still_held if "." in h.what}
    assert named.pop("other") == (f"the variable 'OTHER' of module {__name__}: OTHER['other']",)
    assert named == {kind: (name,) for kind, (_, name) in HOLDERS.items()}
    first, *_, last = report.still_held
    assert (first.nbytes, last.nbytes) == (400, 8), "what a variable holds comes first in the text"
    assert f"held by {VARIABLE}: KEPT['large'].entry and 9 more; to free it, pass KEPT" in str(
        report
    )


def test_local_variables_are_named_with_their_functions_and_lines() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False))
    my_layer, inner = model
    by_name = {"embed": [inner]}
    layers, ready, done = [my_layer], threading.Event(), threading.Event()

    def work() -> None:
        layer_of_thread = layers.pop()
        ready.set()
        done.wait()
        del layer_of_thread

    def embed() -> nn.Module:
        return inner

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    report = release(model)
    named = " and ".join(name for held in report.still_held for name in held.holders)
    line = sys._getframe().f_lineno - 1
    done.set()
    thread.join()
    name = sys._getframe().f_code.co_name
    assert f"'my_layer' of {name}() at {__file__}:{line}" in named
    assert "the variable 'layer_of_thread' of " in named
    assert "; to free it, pass my_layer too" in str(report)
    assert f"the variable 'inner' of {name}()" in named and embed() is inner
    assert "by_name['embed'][0]" in named and by_name
    storages = weak(my_layer)
    with without_collector():
        del my_layer
        assert gone(storages), "the search keeps nothing alive"


def cached(layer: nn.Module) -> Any:
    @functools.lru_cache
    def load(key: int) -> nn.Module:
        return layers.pop()

    layers = [layer]
    load(1)
    return load


def in_a_generator(layer: nn.Module) -> Any:
    def stream() -> Iterator[None]:
        yield
        assert layer

    generator = stream()
    next(generator)
    return generator


def in_a_context(layer: nn.Module) -> Any:
    context = contextvars.copy_context()
    context.run(CURRENT.set, layer)
    return context


PLACES: list[tuple[Callable[[Any], Any], str]] = [
    (in_a_closure, rf"in_a_closure.*embed\(\) at {__file__}:\d+: its variable 'weight'"),
    (lambda layer: lambda model=layer: model, r"the function <lambda>.*\(\).*: a default value"),
    (lambda layer: type("Registry", (), {"model": layer}), "the class Registry: model"),
    (cached, r"the lru_cache of cached.<locals>.load\(\) at "),
    (in_a_generator, rf"in_a_generator.<locals>.stream\(\) at {__file__}:\d+"),
    (in_a_context, "the context variable 'current_model'"),
    (lambda layer: layer.forward, "the variable 'kept' of "),
]


@pytest.mark.usefixtures("frozen_heap")
def test_functions_classes_and_caches_are_named() -> None:
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in PLACES])
    kept = [keep(layer) for (keep, _), layer in zip(PLACES, model, strict=True)]
    holders = {held.what: held.holders for held in release(model).still_held}
    for number, (_, expected) in enumerate(PLACES):
        names = holders[f"Sequential.{number}"]
        assert any(re.search(expected, name) for name in names), names
    del kept


def test_search_runs_when_the_holders_are_read() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    KEPT["layer"] = model[0]
    (held,) = release(model, collect="never").still_held
    KEPT["list"] = [KEPT.pop("layer")]
    assert held.holders == (f"{VARIABLE}: KEPT['list'][0]",)
    model = nn.Sequential(nn.Linear(8, 8))
    layer = model[0]
    (held,) = release(model, collect="never").still_held
    del layer
    assert held.holders == ("nothing any longer: it is free by now",)
    assert pickle.loads(pickle.dumps(held)).holders == held.holders


@pytest.mark.usefixtures("frozen_heap")
def test_locals_of_unrelated_exceptions_are_kept() -> None:
    def fail(batch: torch.Tensor) -> None:
        loss = (batch * batch).sum()
        raise ValueError(loss.item())

    with pytest.raises(ValueError) as kept:
        fail(torch.ones(3, requires_grad=True))
    model = nn.Sequential(nn.Linear(8, 8))
    layer = model[0]
    assert release(model).still_held
    assert sorted(kept.traceback[-1].frame.f_locals) == ["batch", "loss"]
    del layer
