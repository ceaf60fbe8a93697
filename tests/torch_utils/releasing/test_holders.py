"""The report names who still holds memory that was given up."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support.programs import assert_clean, run_forked
from support.releasing import gone, release_and_search, weak
from torch_utils import release


def holders(report: Any) -> str:
    (held,) = report.still_held
    return " and ".join(held.holders)


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


def in_a_generator(weight: nn.Parameter) -> Any:
    def batches() -> Any:
        mine = weight
        while True:
            yield mine.shape

    generator = batches()
    next(generator)
    return generator


def in_an_error(weight: nn.Parameter) -> Any:
    with pytest.raises(ValueError) as caught:
        raise ValueError(weight.shape)
    return caught


HOLDERS: dict[str, tuple[Callable[[nn.Parameter], Any], str]] = {
    "module": (in_another_module, "another module (Linear)"),
    "optimizer": (lambda w: torch.optim.SGD([w], lr=0.1), "an optimizer (SGD)"),
    "graph": (lambda w: (torch.ones(1, 8, requires_grad=True) @ w).sum(), "an autograd graph"),
    "numpy": (lambda w: w.detach().numpy(), "a numpy view"),
    "container": (lambda w: {"weights": [w]}, "the variable 'my_holder' of "),
    "closure": (lambda w: lambda: w, "a closure"),
    "object": (in_an_object, "a Cache"),
    "generator": (in_a_generator, "the suspended"),
    "error": (in_an_error, "a frame of in_an_error() that an exception keeps"),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_holder_is_named(kind: str) -> None:
    make, name = HOLDERS[kind]
    model = nn.Linear(8, 8, bias=False)
    my_holder = make(model.weight)
    assert name in holders(release_and_search(model))
    del my_holder


def test_a_variable() -> None:
    """A variable of a function that is running, by its name."""
    model = nn.Linear(8, 8, bias=False)
    my_weight = model.weight
    named = holders(release_and_search(model))
    assert "the variable 'my_weight' of test_a_variable()" in named
    del my_weight


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


def test_holder_is_named_within_the_default_time() -> None:
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
    storages = weak(weight, kept)
    assert holders(release_and_search(model))
    del weight, kept
    assert gone(storages)


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
        assert "the variable 'weight_of_thread' of work()" in holders(release_and_search(model))
    finally:
        done.set()
        thread.join()


def test_freezing_is_no_answer_where_another_is_known() -> None:
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
    """Without time to search, the report still says what survived."""
    tensor = torch.ones(100)
    view = tensor[1:]
    report = release(tensor, search_s=0.0)
    assert report.still_held[0].holders == ()
    assert "something that was not found" in str(report)
    assert view.sum() == 99


def test_search_for_holders_leaves_locals_alone() -> None:
    """Before Python 3.13, reading ``f_locals`` writes into what ``locals()`` has returned."""
    tensor = torch.ones(5)
    view = tensor[:2]
    seen = locals()
    number = 5
    (held,) = release(tensor).still_held
    assert "'view'" in str(held.holders)
    assert view.sum() == 2
    assert "number" not in seen
    if sys.version_info < (3, 13):
        frame = inspect.currentframe()
        assert frame is not None and frame.f_locals["number"] == number  # The control.
        assert seen["number"] == number


def test_search_for_holders_beside_threads_that_call_and_return() -> None:
    """Their variables are as they were; the search for holders may give up beside them."""
    before = sys.getswitchinterval()
    stop = threading.Event()
    wrong: list[object] = []

    def leaf(depth: int) -> int:
        word, size = f"leaf {depth}", depth

        def closure() -> str:
            return f"leaf {size}"

        deeper = leaf(depth - 1) if depth else 0
        if closure() != word:
            wrong.append((closure(), word))
        return deeper + 1

    def work() -> None:
        while not stop.is_set():
            if leaf(20) != 21:
                wrong.append("depth")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        sys.setswitchinterval(1e-5)
        for _ in range(40):
            tensor = torch.ones(5)
            view = tensor[:2]
            (held,) = release(tensor, collect="never").still_held
            assert held.nbytes == 20
            assert not held.holders or "'view'" in str(held.holders)
            del view
    finally:
        sys.setswitchinterval(before)
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
