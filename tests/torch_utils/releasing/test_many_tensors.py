"""Lists of tensors: in steps of C, and each as safely as if it were released alone."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import everywhere, run_interrupted
from older_torch import needs_fast_notes

from torch_utils import release
from torch_utils._releasing import in_use, tensors


def calls_of(function: Callable[[], Any]) -> int:
    """Count the calls of functions in Python that something takes."""
    counts: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: counts.update([event]))
    try:
        function()
    finally:
        sys.setprofile(None)
    return counts["call"]


@needs_fast_notes
@pytest.mark.parametrize("contain", [list, lambda made: dict(enumerate(made)), tuple])
def test_no_call_for_each(contain: Callable[[Any], Any]) -> None:
    """A thousand tensors more take few calls more; a release of each by itself takes many."""
    few, many = ([torch.ones(2) for _ in range(count)] for count in (10, 1010))
    release(torch.ones(1))
    cost = calls_of(lambda: release(contain(few), trim_host=False))
    assert calls_of(lambda: release(contain(many), trim_host=False)) < cost + 500
    assert all(tensor.shape == (0,) for tensor in many)
    control = [torch.ones(2) for _ in range(20)]
    assert calls_of(lambda: [release(tensor) for tensor in control]) > 20 * 25


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4)


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.note = [torch.ones(4)]
    return tensor


def hooked() -> torch.Tensor:
    tensor = torch.ones(4, requires_grad=True)
    tensor.register_hook(print)
    return tensor


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "float": lambda: torch.ones(4),
    "parameter": lambda: torch.nn.Parameter(torch.ones(4)),
    "frozen": lambda: torch.nn.Parameter(torch.ones(4), requires_grad=False),
    "double": lambda: torch.ones(4, dtype=torch.float64),
    "bool": lambda: torch.ones(4, dtype=torch.bool),
    "meta": lambda: torch.ones(4, device="meta"),
    "not a leaf": lambda: torch.ones(4, requires_grad=True) * 2,
    "inferred": inferred,
    "with an attribute": with_attribute,
    "hooked": hooked,
    "sparse": lambda: torch.eye(4).to_sparse(),
    "quantized": lambda: torch._empty_affine_quantized(
        (4,), scale=1.0, zero_point=0, dtype=torch.qint8
    ),
}


@pytest.mark.filterwarnings("ignore:.*quantized")  # torch announces their end.
@pytest.mark.parametrize("name", KINDS)
def test_the_same_among_others(name: str) -> None:
    """Among others a tensor comes to what it comes to alone."""
    alone, among = KINDS[name](), KINDS[name]()
    others = [torch.ones(4) for _ in range(9)]
    gradient = torch.ones(4)
    others[0].grad = gradient
    report = release([*others[:4], among, *others[4:], None, among])
    assert report.errors == () and release(alone).errors == ()
    for tensor in (*others, among):
        assert tensor.numel() == 0 and not vars(tensor) and not tensor._backward_hooks
        assert tensor.grad is None
    for what in ("shape", "dtype", "device", "requires_grad", "is_leaf", "is_quantized"):
        assert getattr(among, what) == getattr(alone, what), what
    assert among.is_inference() == alone.is_inference()
    others[0].resize_(3).fill_(1)  # None of them shares its memory with another.
    others[1].resize_(3).fill_(2)
    assert others[0].tolist() == [1, 1, 1]


def test_report_names_them() -> None:
    """Each by its place in what was handed over; a gradient by its tensor."""
    made = {"a": torch.ones(1000), "b": [torch.ones(1000) for _ in range(3)]}
    kept, made["a"].grad = made["b"][1].numpy(), torch.ones(1000)
    gradient = made["a"].grad
    report = release(made, trim_host=False)
    assert sorted(held.what for held in report.still_held) == ["dict['a'].grad", "dict['b'][1]"]
    assert report.freed_bytes["host"] == 3 * 4000
    assert kept.sum() == gradient.sum() == 1000


def test_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is the only one, and all others are emptied."""
    made = [torch.ones(2) for _ in range(600)]
    swap = torch._C._swap_tensor_impl

    def refuse(tensor: Any, other: Any) -> None:
        if tensor is made[300]:
            raise RuntimeError("not this one")
        swap(tensor, other)

    monkeypatch.setattr(torch._C, "_swap_tensor_impl", refuse)
    report = release(made, trim_host=False)
    assert [str(error) for error in report.errors] == ["not this one"]
    assert [n for n, tensor in enumerate(made) if tensor.numel()] == [300]
    assert not in_use.is_any_kept()


@pytest.mark.parametrize("step", [31, pytest.param(7, marks=pytest.mark.slow)])
def test_interrupted_anywhere(step: int) -> None:
    """All are emptied, or none was touched, and nothing is kept for ever."""

    def check(number: int) -> bool:
        made = [torch.ones(2) for _ in range(5)]
        reached, arrived = run_interrupted(
            lambda: release(made, collect="never", trim_host=False),
            number,
            *("_releasing/work", "_releasing/tensors", "_releasing/in_use"),
        )
        assert reached == arrived, number
        assert {tensor.numel() for tensor in made} in ({0}, {2}), number
        assert in_use.settle(), number
        return reached

    assert everywhere(check, step) > 20


@pytest.mark.parametrize("is_used", [True, False])
def test_kept_for_the_thread_that_uses_it(is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that a thread at work has a reference to is kept; the others are not."""
    made = [torch.ones(2) for _ in range(300)]
    begun, over = threading.Event(), threading.Event()
    monkeypatch.setattr(in_use, "_WAITING", frozenset())  # Waiting stands for computing here.
    monkeypatch.setattr(in_use, "WAIT_S", 0)
    kept: list[list[Any]] = []

    def work(tensor: Any) -> None:
        begun.set()
        over.wait()

    thread = threading.Thread(target=work, args=(made[7] if is_used else torch.ones(2),))
    thread.start()
    begun.wait()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(
                in_use, "settle", lambda: kept.extend(k[0] for k in in_use._KEPT.values())
            )
            release(made, collect="never", trim_host=False)
        assert [len(some) for some in kept] == ([1] if is_used else [])
    finally:
        kept.clear()
        over.set()
        thread.join()
    monkeypatch.undo()  # Threads that others left wait for ever.
    assert in_use.settle(60)


def test_gone_without_a_collection() -> None:
    """Nothing is left of them but what the program's variables hold."""
    made = [torch.ones(2) for _ in range(300)]
    references = [weakref.ref(tensor) for tensor in made]
    gc.disable()
    try:
        release(made, collect="never", trim_host=False)
        made.clear()
        assert not any(reference() is not None for reference in references)
    finally:
        gc.enable()


def test_references_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release's own are known exactly: with one more, each tensor would look used."""
    seen: list[int] = []

    def look(swap: Any, some: Any, others: Any, references: int) -> None:
        seen.extend(sys.getrefcount(tensor) - references for tensor in some)

    monkeypatch.setattr(tensors, "swap_all", look)
    release([torch.ones(2) for _ in range(5)], collect="never", trim_host=False)
    # This loop's own variable, and getrefcount's.
    assert set(seen) == {2}
