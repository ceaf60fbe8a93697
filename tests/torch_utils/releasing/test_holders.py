"""Tests of the holders that a report names."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type"

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.programs import assert_clean, run_forked
from support.releasing import gone, named_local, release_and_search, weak
from torch_utils import release

KEPT: dict[str, Any] = {}
"""What a variable holds that is found in every version of Python: one of a module."""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    KEPT.clear()


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
    "container": (lambda w: {"weights": [w]}, f"the variable 'KEPT' of module {__name__}"),
    "closure": (lambda w: lambda: w, "a closure"),
    "object": (in_an_object, "a Cache"),
    "generator": (in_a_generator, "the suspended"),
    "error": (in_an_error, "a frame of in_an_error() that an exception keeps"),
}


FEW = ("module", "container", "object")
SLOW_HOLDERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in HOLDERS if kind not in FEW]


@pytest.mark.parametrize("kind", [*FEW, *SLOW_HOLDERS])
def test_holder_is_named(kind: str) -> None:
    make, name = HOLDERS[kind]
    model = nn.Linear(8, 8, bias=False)
    KEPT["holder"] = make(model.weight)
    assert name in holders(release_and_search(model))


@pytest.mark.slow
def test_variable_of_a_running_function_is_named() -> None:
    model = nn.Linear(8, 8, bias=False)
    my_weight = model.weight
    named = holders(release_and_search(model))
    variable = "the variable 'my_weight' of test_variable_of_a_running_function_is_named()"
    # Before Python 3.13 a search that found nothing says so only if it had the time for all.
    assert named_local(variable) in named or (sys.version_info < (3, 13) and not named)
    del my_weight


@pytest.mark.slow
def test_report_names_a_variable_before_an_autograd_graph() -> None:
    program = """
    import torch
    from torch_utils import release
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
    optimizer = torch.optim.Adam(net.parameters())
    loss = net(torch.ones(2, 8)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    report = release(net, optimizer, search_s=10)
    assert len(report.still_held) > 20
    assert "the variable 'loss'" in str(report), report
    """
    assert_clean(run_forked(program, quick_end=True))


@pytest.mark.slow
def test_report_starts_with_storage_held_by_a_variable() -> None:
    large, small = torch.ones(100), torch.ones(2)
    KEPT["object"], KEPT["view"] = in_an_object(large[1:]), small[1:]
    report = release_and_search(large, small)
    assert [held.nbytes for held in report.still_held] == [400, 8]
    assert "(8 B on host), held by the variable 'KEPT'" in str(report)


def test_output_of_ipython_is_named(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    program = """
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell()
    cells = [
        "import torch; from torch_utils import release; tensor = torch.ones(10)",
        "tensor[1:]",
        "report = release(tensor, search_s=10)",
    ]
    for cell in cells:
        shell.run_cell(cell, store_history=True).raise_error()
    report = shell.user_ns["report"]
    assert report.still_held[0].holders[0] == "Out[2]", report
    assert "held by Out[2]" in str(report), report
    """
    assert_clean(run_forked(program, env={"IPYTHONDIR": str(tmp_path)}, quick_end=True))


@pytest.mark.slow
def test_report_mentions_gc_freeze_for_a_frozen_cycle() -> None:
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


@pytest.mark.slow
def test_holder_is_found_within_the_default_time() -> None:
    program = """
    import torch
    from torch_utils import release
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    print(release(model))
    """
    for _ in range(20):  # Other programs may take most of that time.
        done = run_forked(program)  # To its end: an optimizer imports Triton, which counts.
        assert_clean(done)
        if "an optimizer (SGD)" in done.stdout:
            return
    pytest.fail(done.stdout)


@pytest.mark.slow
def test_search_keeps_no_variable_alive() -> None:
    model, kept = nn.Linear(8, 8, bias=False), torch.ones(10)
    weight = KEPT["weight"] = model.weight
    storages = weak(weight, kept)
    assert "'KEPT'" in holders(release_and_search(model))
    del weight, kept, KEPT["weight"]
    assert gone(storages)


@pytest.mark.slow
def test_variable_of_another_thread_is_named() -> None:
    model = nn.Linear(8, 8, bias=False)
    weights, ready, done = [model.weight], threading.Event(), threading.Event()

    def work() -> None:
        weight_of_thread = weights.pop()
        ready.set()
        done.wait()
        del weight_of_thread

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        named = holders(release_and_search(model))
        assert named_local("the variable 'weight_of_thread' of work()") in named
    finally:
        done.set()
        thread.join()


@pytest.mark.slow
def test_gc_freeze_is_not_mentioned_if_a_graph_is_known() -> None:
    program = """
    import gc, torch
    from torch_utils import release
    gc.freeze()
    for search_s in (1e-9, 10):
        model = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
        loss = model(torch.ones(8, 8, requires_grad=True)).sum()
        (held,) = release(model, search_s=search_s).still_held
        assert "gc.freeze()" not in " ".join(held.holders), (search_s, held)
    """
    assert_clean(run_forked(program, quick_end=True))


def test_search_without_time_reports_survivors() -> None:
    tensor = torch.ones(100)
    view = tensor[1:]
    report = release(tensor, search_s=0.0)
    assert report.still_held[0].holders == ()
    assert "something that was not found" in str(report)
    assert view.sum() == 99


@pytest.mark.slow
def test_search_does_not_change_locals() -> None:
    tensor = torch.ones(5)
    KEPT["view"] = tensor[:2]
    seen = locals()
    number = 5
    assert "'KEPT'" in holders(release_and_search(tensor))
    assert "number" not in seen
    if sys.version_info < (3, 13):
        frame = inspect.currentframe()
        assert frame is not None and frame.f_locals["number"] == number  # The control.
        assert seen["number"] == number


@pytest.mark.slow
def test_search_does_not_disturb_other_threads() -> None:
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
            KEPT["view"] = tensor[:2]
            (held,) = release(tensor, collect="never").still_held
            assert held.nbytes == 20
            assert not held.holders or "'KEPT'" in str(held) or "another thread" in str(held)
    finally:
        sys.setswitchinterval(before)
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
