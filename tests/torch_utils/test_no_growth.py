"""Tests of `no_growth`: leaks are found and named, and ordinary code raises no alarm."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type, assignment, attr-defined, index, operator, type-var"

import asyncio
import functools
import gc
import pickle
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.releasing import garbage_collections
from torch_utils import MemoryGrowthError, live_memory, no_growth

KEPT: dict[str, Any] = {}
MODEL = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 4))
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    for handle in KEPT.get("handles", ()):
        handle.remove()
    table_of.cache_clear()
    KEPT.clear()


def training_step() -> None:
    OPTIMIZER.zero_grad()
    MODEL(torch.rand(8, 20)).sum().backward()
    OPTIMIZER.step()


def failing_batch() -> None:
    try:
        MODEL(torch.rand(8, 21))
    except RuntimeError as error:
        assert "shapes" in str(error)


def last_output() -> None:
    KEPT["last"] = MODEL(torch.rand(8, 20)).detach()


def new_weights() -> None:
    with torch.no_grad():
        MODEL[0].weight.data = MODEL[0].weight.data * 0.9


def with_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        MODEL(torch.rand(8, 20))


def in_a_cycle() -> None:
    model = nn.Linear(5, 5)
    model.me = [model]
    model(torch.ones(5)).sum().backward()


def generate() -> None:
    assert len([MODEL(torch.rand(2, 20)) for _ in range(3)]) == 3


def parametrized() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    layer(torch.ones(4)).sum().backward()


def loss_of_last_step() -> None:
    KEPT["loss"] = MODEL(torch.rand(8, 20)).sum()


CLEAN = (
    *(training_step, failing_batch, loss_of_last_step),
    *(
        pytest.param(run, marks=pytest.mark.slow)
        for run in (last_output, new_weights, with_autocast, in_a_cycle, generate, parametrized)
    ),
)


@pytest.mark.parametrize("run", CLEAN)
def test_ordinary_code_is_no_growth(run: Callable[[], None]) -> None:
    run()  # Buffers, states and outputs that are made once.
    for _ in range(3):
        with no_growth():
            run()


def add_outputs() -> None:
    KEPT.setdefault("outputs", []).append(MODEL(torch.rand(8, 20)).detach())


def add_losses() -> None:
    KEPT["total"] = KEPT.get("total", 0) + MODEL(torch.rand(8, 20)).sum()


def keep_activations() -> None:
    seen: list[torch.Tensor] = []
    KEPT.setdefault("handles", []).append(
        MODEL[0].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    )
    MODEL(torch.rand(8, 20))


@functools.lru_cache
def table_of(size: int) -> torch.Tensor:
    return torch.ones(size)


def fill_cache() -> None:
    KEPT["size"] = KEPT.get("size", 100) + 1
    table_of(KEPT["size"])


def keep_errors() -> None:
    def work() -> None:
        batch = torch.rand(333)
        raise ValueError(batch.shape)

    try:
        work()
    except ValueError as error:
        KEPT.setdefault("errors", []).append(error)


VARIABLE = f"the variable 'KEPT' of module {__name__}"
LEAKS: list[tuple[Callable[[], None], str, str]] = [
    (add_outputs, "a tensor (8, 4) float32", f"{VARIABLE}: KEPT['outputs'][1]"),
    (
        add_losses,
        "tensors of an autograd graph",
        f"{VARIABLE}: KEPT['total']",
    ),
    (keep_activations, "a tensor (8, 20) float32", "its variable 'seen'"),
    (fill_cache, "a tensor (102,) float32", "the lru_cache of table_of() at "),
    (keep_errors, "a tensor (333,) float32", f"{VARIABLE}, an exception that ended "),
]


@pytest.mark.parametrize(("leak", "what", "holder"), LEAKS)
def test_leak_is_found_and_named(leak: Callable[[], None], what: str, holder: str) -> None:
    gc.collect()  # A graph that ends meanwhile would hide how many operations another one gained.
    leak()
    with garbage_collections() as generations, pytest.raises(MemoryGrowthError) as caught:
        with no_growth():
            leak()
    assert generations.count(2) in (1, 2)  # Python may start one by itself.
    (entry,) = caught.value.entries
    assert what in entry.what
    assert any(holder in name for name in entry.holders), entry.holders
    assert holder in str(caught.value) and "warmup=1" in str(caught.value)
    assert isinstance(caught.value, AssertionError)


def test_empty_block_causes_no_full_collection() -> None:
    gc.collect()
    with garbage_collections() as generations:
        with no_growth():
            pass
    assert 2 not in generations


def test_what_a_graph_has_used_was_there_before() -> None:
    """Before torch 2.10, a tensor that C++ uses as well does not refer to its class."""
    batch = torch.rand(9, 20)
    KEPT["loss"] = MODEL(batch).sum()
    with no_growth():
        del KEPT["loss"]
    assert batch.shape == (9, 20)


def test_growth_below_the_limit_passes() -> None:
    with no_growth(least_bytes=1000):
        KEPT["small"] = torch.ones(100)
    with pytest.raises(MemoryGrowthError), no_growth(least_bytes=1000):
        KEPT["large"] = [torch.ones(200), torch.ones(60)]


def test_exception_of_the_block_wins() -> None:
    with pytest.raises(KeyError), no_growth():
        KEPT["x"] = torch.ones(9)
        raise KeyError


def test_decorator_measures_functions_and_coroutines_but_not_what_they_return() -> None:
    calls: list[int] = []

    @no_growth(warmup=2)
    def answer(size: int) -> torch.Tensor:
        calls.append(size)
        if len(calls) == 1:
            KEPT["buffer"] = torch.ones(77)
        return MODEL(torch.rand(size, 20))

    assert answer(3).shape == (3, 4)
    assert calls == [3, 3, 3]
    answer(3)
    assert len(calls) == 4, "later calls are measured at once"

    @no_growth()
    async def serve(leaks: bool) -> torch.Tensor:
        await asyncio.sleep(0)
        if leaks:
            add_outputs()
        return torch.ones(5)

    assert asyncio.run(serve(False)).sum() == 5
    with pytest.raises(MemoryGrowthError, match=r"serve\(\) left 128 B behind"):
        asyncio.run(serve(True))


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


def test_caches_that_are_meant_are_ignored() -> None:
    module = types.ModuleType("plugin")
    module.__dict__.update(__builtins__={}, tables=[])
    KEPT["cache"], KEPT["module"] = Cache(), module

    def fill(also: Any = None) -> None:
        KEPT["cache"].entries.append(torch.ones(11))
        table_of(4321)
        module.tables.append(torch.ones(12))
        if also is not None:
            KEPT["also"] = also

    with no_growth(ignore=[Cache, table_of, module]):
        fill()
    with pytest.raises(MemoryGrowthError) as caught, no_growth(ignore=(Cache, module, table_of)):
        fill(torch.ones(13))
    assert [one.what for one in caught.value.entries] == ["a tensor (13,) float32"]


def test_what_is_returned_counts_if_something_else_keeps_it() -> None:
    cache: list[torch.Tensor] = []
    KEPT["cache"] = cache

    def keep() -> Any:
        cache.append(torch.ones(9))
        return cache[-1]

    def whole() -> Any:
        keep()
        return cache

    for function in (keep, whole):
        with pytest.raises(MemoryGrowthError):
            no_growth()(function)()
    outputs = no_growth()(lambda: {"a": [torch.ones(5)], "b": torch.ones(6)})()
    assert len(outputs) == 2


def test_gradients_that_are_kept_are_found() -> None:
    def keep() -> None:
        MODEL.zero_grad()
        MODEL(torch.rand(8, 20)).sum().backward()
        KEPT.setdefault("gradients", []).append([one.grad for one in MODEL.parameters()])

    keep()
    with pytest.raises(MemoryGrowthError), no_growth():
        keep()


def test_error_can_be_sent_to_another_process() -> None:
    with pytest.raises(MemoryGrowthError) as caught, no_growth():
        KEPT["x"] = torch.ones(9)
    copy = pickle.loads(pickle.dumps(caught.value.entries))
    assert copy[0].holders == (f"{VARIABLE}: KEPT['x']",)


def test_unknown_devices_are_refused() -> None:
    for use in (no_growth, live_memory):
        with pytest.raises(ValueError, match="torch knows no device 'cudda'"):
            use(device="cudda")
