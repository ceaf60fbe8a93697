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
    model = nn.ModuleDict({kind: nn.Linear(8, 8, bias=False) for kind in HOLDERS})
    KEPT.update({kind: make(model[kind].weight) for kind, (make, _) in HOLDERS.items()})
    large, small = torch.ones(100), torch.ones(2)
    KEPT["large"], KEPT["small"] = in_an_object(large[1:]), small[1:]
    report = release(model, large, small)
    named = {h.what.split(".")[1]: h.holders for h in report.still_held if "." in h.what}
    assert named == {kind: (name,) for kind, (_, name) in HOLDERS.items()}
    first, *_, last = report.still_held
    assert (first.nbytes, last.nbytes) == (400, 8), "what a variable holds comes first in the text"
    assert f"held by {VARIABLE}: KEPT['large'].entry and 8 more; to free it, pass KEPT" in str(
        report
    )


def test_local_variables_are_named_with_their_functions_and_lines() -> None:
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
    report = release(model)
    (held,) = report.still_held
    named = " and ".join(held.holders)
    line = sys._getframe().f_lineno - 1
    done.set()
    thread.join()
    assert f"'my_layer' of {sys._getframe().f_code.co_name}() at {__file__}:{line}" in named
    assert "the variable 'layer_of_thread' of " in named
    assert "; to free it, pass my_layer too" in str(report)
    storages = weak(my_layer)
    del my_layer
    assert gone(storages), "the search keeps nothing alive"


def function_with_a_default(layer: nn.Module) -> Any:
    def embed(model: nn.Module = layer) -> Any:
        return model

    return embed


def class_attribute(layer: nn.Module) -> Any:
    class Registry:
        model = layer

    return Registry


def cached(layer: nn.Module) -> Any:
    @functools.lru_cache
    def load() -> nn.Module:
        return layer

    load()
    closure: Any = load.__wrapped__.__closure__
    closure[0].cell_contents = None
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


CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("current_model")
PLACES: list[tuple[Callable[[Any], Any], str]] = [
    (
        in_a_closure,
        rf"the function in_a_closure.*embed\(\) at {__file__}:\d+: its variable 'weight'",
    ),
    (
        function_with_a_default,
        r"the function function_with_a_default.*embed\(\).*: a default value",
    ),
    (class_attribute, r"the class class_attribute.<locals>.Registry: model"),
    (cached, r"the lru_cache of cached.<locals>.load\(\) at "),
    (in_a_generator, rf"in_a_generator.<locals>.stream\(\) at {__file__}:\d+"),
    (in_a_context, "the context variable 'current_model'"),
    (lambda layer: layer.forward, "the variable 'kept' of "),
]


@pytest.mark.parametrize(("keep", "expected"), PLACES)
def test_functions_classes_and_caches_are_named(keep: Any, expected: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    kept = keep(model[0])
    (held,) = release(model).still_held
    assert any(re.search(expected, name) for name in held.holders), held.holders
    del kept


def test_total_loss_is_named_as_a_graph() -> None:
    """A loss that is added up keeps the graph of each batch, and with it the weights."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    KEPT["total"] = sum(model(torch.ones(8)).mean() for _ in range(3))
    held = release(model).still_held
    assert len(held) == 4
    expected = f"the autograd graph or a view of {VARIABLE}: KEPT['total']"
    assert {one.holders for one in held} == {(expected,)}


def test_search_runs_when_the_holders_are_read() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    KEPT["layer"] = model[0]
    (held,) = release(model, collect="never").still_held
    KEPT["list"] = [KEPT.pop("layer")]
    assert held.holders == (f"{VARIABLE}: KEPT['list'][0]",)
    (held,) = release(KEPT, nn.Sequential(KEPT["list"][0]), collect="never").still_held or (held,)
    model = nn.Sequential(nn.Linear(8, 8))
    layer = model[0]
    (held,) = release(model, collect="never").still_held
    del layer
    assert held.holders == ("nothing any longer: it is free by now",)
    assert pickle.loads(pickle.dumps(held)).holders == held.holders


def test_locals_of_unrelated_exceptions_are_kept() -> None:
    def fail(batch: torch.Tensor) -> None:
        loss = (batch * batch).sum()
        raise ValueError(loss.item())

    kept = None
    try:
        fail(torch.ones(3, requires_grad=True))
    except ValueError as error:
        kept = error
    model = nn.Sequential(nn.Linear(8, 8))
    layer = model[0]
    assert release(model).still_held
    assert kept is not None and kept.__traceback__ is not None
    frame = kept.__traceback__.tb_next.tb_frame  # type: ignore[union-attr]
    assert sorted(frame.f_locals) == ["batch", "loss"]
    del layer


def test_reading_the_holders_keeps_nothing_alive() -> None:
    KEPT["me"] = KEPT
    for outer in (None, torch.ones(3)):
        model = nn.Sequential(nn.Linear(8, 8))
        KEPT["layer"] = [model[0], outer]
        storages = weak(model[0])
        report = release(model)
        assert KEPT["layer"] and "KEPT['layer'][0]" in str(report)
        with without_collector():
            del KEPT["layer"]
            assert gone(storages)


def test_variable_that_an_inner_function_uses_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    layer = model[0]

    def embed() -> nn.Module:
        return layer

    (held,) = release(model).still_held
    named = " and ".join(held.holders)
    assert "the variable 'layer' of test_variable_that_an_inner_function_uses_is_named()" in named
    assert embed() is layer


OTHER: dict[str, Any] = {}
THIRD: list[Any] = []


def test_each_of_several_variables_of_a_module_is_named() -> None:
    """They stand in one dictionary."""
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    KEPT["a"], OTHER["b"] = model[0], model[1]
    THIRD.append(model[2])
    named = {one.what[-1]: one.holders for one in release(model).still_held}
    OTHER.clear()
    THIRD.clear()
    place = f"of module {__name__}"
    assert named == {
        "0": (f"the variable 'KEPT' {place}: KEPT['a']",),
        "1": (f"the variable 'OTHER' {place}: OTHER['b']",),
        "2": (f"the variable 'THIRD' {place}: THIRD[0]",),
    }
