"""`release` reads the variables of running functions, and changes nothing by it."""

from __future__ import annotations

import inspect
import sys
import threading

import torch

from torch_utils import release


def test_release_names_the_holder_and_leaves_locals_alone() -> None:
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


def test_release_beside_threads_that_call_and_return() -> None:
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
