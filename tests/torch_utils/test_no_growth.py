"""Tests of `no_growth`: leaks are found and named, and ordinary code raises no alarm."""

# Misuses things on purpose.
# mypy: disable-error-code="arg-type, call-overload, operator, type-var"

import asyncio
import functools
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.releasing import garbage_collections
from torch_utils import MemoryGrowthError, no_growth


def table_of(size: int) -> torch.Tensor:
    return torch.ones(size)


@pytest.fixture
def app(app: Any) -> Any:
    """Return a module with a model, a list and a function with a cache."""
    app.model = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 4))
    app.kept, app.total, app.table_of = [], 0, functools.lru_cache(table_of)
    return app


def output_of(app: Any) -> Any:
    return app.model(torch.rand(8, 20))


def training_step(app: Any) -> None:
    if not hasattr(app, "optimizer"):
        app.optimizer = torch.optim.SGD(app.model.parameters(), lr=0.1, momentum=0.9)
    app.optimizer.zero_grad()
    output_of(app).sum().backward()
    app.optimizer.step()


def failing_batch(app: Any) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        app.model(torch.rand(8, 21))


def last_output_and_loss(app: Any) -> None:
    app.last, app.loss = output_of(app).detach(), output_of(app).sum()


def with_autocast(app: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output_of(app)


def parametrized_in_a_cycle(app: Any) -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    layer.me = [layer]
    layer(torch.ones(4)).sum().backward()


CLEAN = (
    pytest.param(training_step, marks=pytest.mark.xdist_group("optimizers")),  # slow to import
    *(failing_batch, last_output_and_loss, with_autocast, parametrized_in_a_cycle),
)


@pytest.mark.parametrize("run", CLEAN)
def test_ordinary_code_is_no_growth(run: Callable[[Any], None], app: Any) -> None:
    run(app)  # Buffers, states and outputs that are made once.
    for _ in range(2):
        with no_growth():
            run(app)


def add_outputs(app: Any) -> None:
    app.kept.append(output_of(app).detach())


def add_losses(app: Any) -> None:
    app.total = app.total + output_of(app).sum()


def keep_activations(app: Any) -> None:
    seen: list[torch.Tensor] = []
    app.model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    output_of(app)


def fill_cache(app: Any) -> None:
    app.table_of(101 + app.table_of.cache_info().currsize)


def keep_errors(app: Any) -> None:
    def work() -> None:
        batch = torch.rand(333)
        raise ValueError(batch.shape)

    try:
        work()
    except ValueError as error:
        app.kept.append(error)


KEPT = "the variable 'kept' of module app"
LEAKS: list[tuple[Callable[[Any], None], str, str]] = [
    (add_outputs, "a tensor (8, 4) float32", f"{KEPT}: kept[1]"),
    (add_losses, "tensors of an autograd graph", "the variable 'total' of module app"),
    (keep_activations, "a tensor (8, 20) float32", "its variable 'seen'"),
    (fill_cache, "a tensor (102,) float32", "the lru_cache of table_of() at "),
    (keep_errors, "a tensor (333,) float32", f"{KEPT}, an exception that ended "),
]


@pytest.mark.parametrize(("leak", "what", "holder"), LEAKS)
def test_leak_is_found_and_named(
    leak: Callable[[Any], None], what: str, holder: str, app: Any
) -> None:
    leak(app)
    with garbage_collections() as generations, pytest.raises(MemoryGrowthError) as caught:
        with no_growth():
            leak(app)
    assert generations.count(2) in (1, 2)  # Python may start one by itself.
    (entry,) = caught.value.entries
    assert what in entry.what
    assert any(holder in name for name in entry.holders), entry.holders
    assert holder in str(caught.value) and "warmup=1" in str(caught.value)
    assert isinstance(caught.value, AssertionError)
    assert pickle.loads(pickle.dumps(entry)).holders == entry.holders


def test_gradients_that_are_kept_are_found(app: Any) -> None:
    """Also where a gradient is older than its parameter."""
    gradient, app.weight = torch.ones(9), nn.Parameter(torch.ones(9))
    app.weight.grad = gradient
    with pytest.raises(MemoryGrowthError), no_growth():
        app.kept.append(app.weight.grad)
        app.weight.grad = None
        app.weight.sum().backward()

    def keep() -> None:
        app.model.zero_grad()
        output_of(app).sum().backward()
        app.kept.append([one.grad for one in app.model.parameters()])

    keep()
    with pytest.raises(MemoryGrowthError), no_growth():
        keep()


def test_empty_block_causes_no_full_collection(app: Any) -> None:
    with garbage_collections() as generations:
        with no_growth():
            pass
    assert 2 not in generations


def test_what_a_graph_has_used_was_there_before(app: Any) -> None:
    """Before torch 2.10, a tensor that C++ uses as well does not refer to its class."""
    batch = torch.rand(9, 20)
    app.loss = app.model(batch).sum()
    with no_growth():
        del app.loss
    assert batch.shape == (9, 20)


def test_growth_below_the_limit_passes_and_the_blocks_exception_wins(app: Any) -> None:
    with no_growth(least_bytes=1000):
        app.small = torch.ones(100)
    with pytest.raises(MemoryGrowthError), no_growth(least_bytes=1000):
        app.large = [torch.ones(200), torch.ones(60)]
    with pytest.raises(KeyError), no_growth():
        app.other = torch.ones(9)
        raise KeyError


def test_decorator_measures_functions_and_coroutines(app: Any) -> None:
    sizes: list[int] = []

    @no_growth(warmup=2)
    def answer(size: int) -> Any:
        sizes.append(size)
        if len(sizes) == 1:
            app.buffer = torch.ones(77)
        return app.model(torch.rand(size, 20))

    assert answer(3).shape == (3, 4)
    assert sizes == [3, 3, 3]
    answer(3)
    assert len(sizes) == 4, "later calls are measured at once"

    @no_growth()
    async def serve(leaks: bool) -> torch.Tensor:
        await asyncio.sleep(0)
        if leaks:
            add_outputs(app)
        return torch.ones(5)

    assert asyncio.run(serve(False)).sum() == 5
    with pytest.raises(MemoryGrowthError, match=r"serve\(\) left 128 B behind"):
        asyncio.run(serve(True))


def test_what_is_returned_counts_if_something_else_keeps_it(app: Any) -> None:
    def keep() -> Any:
        app.kept.append(torch.ones(9))
        return app.kept[-1]

    def keep_and_return_all() -> Any:
        keep()
        return app.kept

    for function in (keep, keep_and_return_all):
        with pytest.raises(MemoryGrowthError):
            no_growth()(function)()
    outputs = no_growth()(lambda: {"a": [torch.ones(5)], "b": torch.ones(6)})()
    assert len(outputs) == 2


async def asynchronous() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


def test_what_cannot_be_measured_is_refused() -> None:
    for function in (generator, asynchronous, nn.Linear, 3):
        with pytest.raises(TypeError, match="no_growth"):
            no_growth()(function)
    with pytest.raises(TypeError, match=r"has to be awaited or iterated"):
        no_growth()(lambda: generator())()
    with pytest.raises(ValueError, match="warmup is for decorated functions"):
        with no_growth(warmup=1):
            pass
    for options in ({"least_bytes": -1}, {"warmup": 1.5}, {"ignore": [3]}, {"device": 0}):
        with pytest.raises(TypeError, match=next(iter(options))):
            no_growth(**options)


class Cache:
    def __init__(self) -> None:
        self.entries: list[torch.Tensor] = []


def test_caches_that_are_meant_are_ignored(app: Any) -> None:
    plugin: Any = ModuleType("plugin")
    vars(plugin).update(__builtins__={}, tables=[])
    app.cache, app.plugin = Cache(), plugin
    with pytest.raises(MemoryGrowthError) as caught:
        with no_growth(ignore=[Cache, app.table_of, plugin]):
            app.cache.entries.append(torch.ones(11))
            app.table_of(4321)
            plugin.tables.append(torch.ones(12))
            app.other = torch.ones(13)
    assert [one.what for one in caught.value.entries] == ["a tensor (13,) float32"]
