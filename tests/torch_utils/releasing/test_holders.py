"""The report names who still holds memory that was given up."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from programs import assert_clean, run_forked
from torch_utils import release

LONG = {"search_s": 10.0}
pytestmark = pytest.mark.usefixtures("only_own_frames")


def holders(report: Any) -> str:
    (held,) = report.still_held
    return " and ".join(held.holders)


def test_another_module() -> None:
    """A weight that is tied to a live module."""
    live, gone = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    gone.weight = live.weight
    assert "another module (Linear)" in holders(release(gone, **LONG))
    del live


def test_an_optimizer() -> None:
    """A parameter that an optimizer still updates."""
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "an optimizer (SGD)" in holders(release(model, **LONG))
    del optimizer


def test_a_frame() -> None:
    """A variable of a function that is running, by its name."""
    model = nn.Linear(8, 8, bias=False)
    my_weight = model.weight
    named = holders(release(model, **LONG))
    assert "the variable 'my_weight' of test_a_frame()" in named
    del my_weight


def test_a_frame_that_an_exception_keeps() -> None:
    """The frame of a function that failed, kept by its exception."""

    def fail(model: nn.Module) -> None:
        weight = model.weight
        raise ValueError(weight.shape)

    model = nn.Linear(8, 8, bias=False)
    with pytest.raises(ValueError) as caught:
        fail(model)
    assert "a frame of fail()" in holders(release(model, **LONG))
    del caught


def test_an_autograd_graph() -> None:
    """A graph that has saved the weight for its backward pass."""
    model = nn.Linear(8, 8, bias=False)
    loss = model(torch.ones(1, 8, requires_grad=True)).sum()
    assert "an autograd graph" in holders(release(model, **LONG))
    del loss


def test_a_numpy_view() -> None:
    """An array over a tensor's memory."""
    tensor = torch.ones(100)
    array = tensor.numpy()
    assert "a numpy view" in holders(release(tensor, **LONG))
    assert array.sum() == 100


def test_a_frozen_cycle() -> None:
    """A cycle that gc.freeze has put aside is never collected, and that is said."""
    program = """
    import gc, torch
    from torch_utils import release
    class Holder: pass
    model = torch.nn.Linear(8, 8, bias=False)
    holder = Holder(); holder.me = holder; holder.weight = model.weight
    gc.freeze(); del holder
    report = release(model, search_s=10)
    assert "gc.freeze()" in " ".join(report.still_held[0].holders), report
    """
    assert_clean(run_forked(program, quick_end=True))


def test_a_container_of_a_variable() -> None:
    """A list that a dictionary holds: the variable that leads there is named."""
    model = nn.Linear(8, 8, bias=False)
    kept = {"weights": [model.weight]}
    assert "the variable 'kept' of" in holders(release(model, **LONG))
    del kept


def test_a_closure_and_an_instance() -> None:
    """A function's closure, and an object of the program's own."""

    class Cache:
        entry: Any = None

    def remember(weight: torch.Tensor) -> Any:
        return lambda: weight

    models = [nn.Linear(8, 8, bias=False) for _ in range(2)]
    function, cache = remember(models[0].weight), Cache()
    cache.entry = models[1].weight
    assert "a closure" in holders(release(models[0], **LONG))
    assert "a Cache" in holders(release(models[1], **LONG))
    del function


def test_a_suspended_generator() -> None:
    """A generator that waits in the middle, with the weight in a variable."""

    def batches(weight: torch.Tensor) -> Any:
        while True:
            yield weight.shape

    model = nn.Linear(8, 8, bias=False)
    generator = batches(model.weight)
    next(generator)
    assert "the suspended" in holders(release(model, **LONG))
    del generator


def test_named_within_the_default_budget() -> None:
    """In a program of ordinary size nobody has to ask for more time."""
    program = """
    import torch
    from torch_utils import release
    def main():
        model = torch.nn.Linear(8, 8, bias=False)
        optimizer = torch.optim.SGD(model.parameters())
        report = release(model)
        assert "an optimizer (SGD)" in str(report), report
    main()
    """
    assert_clean(run_forked(program))  # To its end: an optimizer imports Triton, which counts.


def test_looking_keeps_nothing_alive() -> None:
    """Reading a running function's variables makes a copy of them, which must not stay."""
    model, kept = nn.Linear(8, 8, bias=False), torch.ones(10)
    weight = model.weight
    storages = [StorageWeakRef(t.untyped_storage()) for t in (weight, kept)]
    assert holders(release(model, **LONG))
    del weight, kept
    assert [s.expired() for s in storages] == [True, True]


def test_no_full_collection_for_what_a_variable_holds() -> None:
    """What is reachable is no garbage; what is not may be, and is collected."""

    def count_full_collections(survive: bool) -> int:
        model = nn.Linear(8, 8, bias=False)
        cycle: list[Any] = [model.weight] if not survive else []
        cycle.append(cycle)
        weight = model.weight if survive else None
        gc.collect()  # Into the oldest generation.
        del cycle
        full = []
        gc.callbacks.append(lambda when, what: full.append(what["generation"] == 2))
        try:
            report = release(model, **LONG)
        finally:
            gc.callbacks.pop()
        assert bool(report.still_held) is survive
        del weight
        return sum(full)

    assert count_full_collections(survive=True) == 0
    assert count_full_collections(survive=False) > 0


def test_a_variable_of_another_thread() -> None:
    """What a function of another thread holds, by the variable's name."""
    model = nn.Linear(8, 8, bias=False)
    ready, done = threading.Event(), threading.Event()

    def work(weight_of_thread: Any) -> None:
        ready.set()
        done.wait()

    thread = threading.Thread(target=work, args=(model.weight,))
    thread.start()
    ready.wait()
    try:
        assert "the variable 'weight_of_thread' of work()" in holders(release(model, **LONG))
    finally:
        done.set()
        thread.join()


def test_freezing_is_blamed_only_where_nothing_else_is_left() -> None:
    """gc.freeze() is no answer while the search has not passed everything, or knows a graph."""
    program = """
    import gc, torch
    from torch_utils import release
    def main():
        gc.freeze()
        for search_s in (1e-9, 10):
            model = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
            loss = model(torch.ones(8, 8, requires_grad=True)).sum()
            (held,) = release(model, search_s=search_s).still_held
            yield search_s, held.holders
    for search_s, holders in main():
        assert "gc.freeze()" not in " ".join(holders), (search_s, holders)
    """
    assert_clean(run_forked(program, quick_end=True))


def test_search_is_bounded() -> None:
    """Without time to search, what survived is still said."""
    tensor = torch.ones(100)
    view = tensor[1:]
    report = release(tensor, search_s=0.0)
    assert report.still_held[0].holders == ()
    assert "something that was not found" in str(report)
    del view
    gc.collect()
