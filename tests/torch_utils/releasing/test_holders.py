"""Tests of the holders that a report names."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type"

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.programs import assert_clean, run_forked
from tests.support.releasing import gone, release_and_search, search_time, weak
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


HOLDERS: dict[str, tuple[Callable[[nn.Parameter], Any], str]] = {
    "module": (in_another_module, "another module (Linear)"),
    "optimizer": (lambda w: torch.optim.SGD([w], lr=0.1), "an optimizer (SGD)"),
    "numpy": (lambda w: w.detach().numpy(), "a numpy view"),
    "container": (lambda w: {"weights": [w]}, f"the variable 'KEPT' of module {__name__}"),
    "object": (in_an_object, "a Cache"),
}


def test_holders_are_named() -> None:
    """By one search of the heap for all."""
    model = nn.ModuleDict({kind: nn.Linear(8, 8, bias=False) for kind in HOLDERS})
    KEPT.update({kind: make(model[kind].weight) for kind, (make, _) in HOLDERS.items()})
    report = release_and_search(model)
    named = {held.what.split(".")[1]: held.holders for held in report.still_held}
    assert set(named) == set(HOLDERS)
    for kind, (_, name) in HOLDERS.items():
        assert any(name in holder for holder in named[kind]), (kind, named)


@pytest.mark.skipif(sys.version_info < (3, 13), reason="reading locals would keep them alive")
def test_variables_of_running_functions_are_named() -> None:
    model = nn.Linear(8, 8, bias=False)
    my_weight = model.weight
    weights, ready, done = [my_weight], threading.Event(), threading.Event()

    def work() -> None:
        weight_of_thread = weights.pop()
        ready.set()
        done.wait()
        del weight_of_thread

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    named = holders(release_and_search(model))
    done.set()
    thread.join()
    assert "the variable 'my_weight' of test_variables_of_running_functions_are_named()" in named
    assert "the variable 'weight_of_thread' of work()" in named
    del my_weight


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
        "from tests.support.releasing import release_and_search",
        "import torch; tensor = torch.ones(10)",
        "tensor[1:]",
        "report = release_and_search(tensor)",
    ]
    for cell in cells:
        shell.run_cell(cell, store_history=True).raise_error()
    report = shell.user_ns["report"]
    assert report.still_held[0].holders[0] == "Out[2]", report
    assert "held by Out[2]" in str(report), report
    """
    assert_clean(run_forked(program, env={"IPYTHONDIR": str(tmp_path)}, quick_end=True))


@pytest.mark.slow
def test_search_keeps_no_variable_alive() -> None:
    model, kept = nn.Linear(8, 8, bias=False), torch.ones(10)
    weight = KEPT["weight"] = model.weight
    storages = weak(weight, kept)
    assert "the variable" in holders(release_and_search(model))
    del weight, kept, KEPT["weight"]
    assert gone(storages)


def test_search_without_time_reports_survivors() -> None:
    tensor = torch.ones(100)
    view = tensor[1:]
    with search_time(0.0):
        report = release(tensor)
    assert report.still_held[0].holders == ()
    assert "an autograd graph" in str(report)
    assert view.sum() == 99
