"""Preparation one step ahead: in order, at the same time, and with nothing left behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rag_demo.encoding.ahead import ahead


def test_order_and_errors() -> None:
    """Results come in order; an error comes where its result would have."""
    assert list(ahead(str, range(50))) == [str(n) for n in range(50)]
    assert list(ahead(str, [])) == []
    assert list(ahead(lambda n: threading.current_thread(), [1])) == [threading.current_thread()]
    results = ahead(lambda n: 10 // n, [5, 2, 0, 1])
    assert [next(results), next(results)] == [2, 5]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_the_next_one_is_prepared_meanwhile() -> None:
    """And no more than that one: while an item is worked on, the next has been prepared."""
    prepared = [threading.Event() for _ in range(4)]
    results = ahead(lambda n: prepared[n].set(), range(4))
    next(results)
    assert prepared[1].wait(10)
    assert not prepared[2].wait(0.1)
    results.close()
    assert not any(t.name.startswith("rag_demo-ahead") for t in threading.enumerate())


def test_control_map_prepares_nothing_meanwhile() -> None:
    """What the test above would have shown of an ordinary loop."""
    prepared = [threading.Event() for _ in range(4)]
    results = (prepared[n].set() for n in range(4))
    next(results)
    assert not prepared[1].wait(0.1)


def test_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the program is ending: the caller prepares."""

    def refuse(self: Any, *args: Any) -> Any:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    assert list(ahead(str, range(5))) == ["0", "1", "2", "3", "4"]
