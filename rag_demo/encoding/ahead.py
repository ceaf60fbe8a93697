"""One step ahead: the next item is prepared by a thread while the caller works on this one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["ahead"]


def ahead(prepare: Callable[[Any], Any], items: Sequence[Any]) -> Generator[Any]:
    """Yield what ``prepare`` makes of each item, in order; one result at most is waiting.

    The thread is there only while the iterator is used, and not at all for a single item or
    when the program is ending and no thread can be started. An error of ``prepare`` is raised
    where its result would have been yielded.
    """
    if len(items) < 2:
        yield from map(prepare, items)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="rag_demo-ahead") as thread:
        waiting = _start(thread, prepare, items[0])
        for item in items[1:]:
            prepared = waiting()
            waiting = _start(thread, prepare, item)
            yield prepared
        yield waiting()


def _start(
    thread: ThreadPoolExecutor, prepare: Callable[[Any], Any], item: Any
) -> Callable[[], Any]:
    try:
        future: Future[Any] = thread.submit(prepare, item)
    except RuntimeError:  # The program is ending: no thread can be started any more.
        return lambda: prepare(item)
    return future.result
