"""Waiting for a change of a host, in a thread or in a coroutine; and work off the event loop."""

from __future__ import annotations

import asyncio
import threading
from _thread import allocate_lock
from collections.abc import Callable
from typing import Any, TypeVar

from torch_utils._runtime import is_shutting_down

__all__ = ["LoopWaiter", "ThreadWaiter", "check_seconds", "off_the_loop"]

T = TypeVar("T")


def check_seconds(what: str, value: object) -> None:
    """Raise unless it says how long to wait: a number of seconds, or None.

    Raises:
        TypeError: It is of another kind.
        ValueError: It is no number ("nan").
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{what} must be a number of seconds, or None, not {value!r}")
    if value != value:
        raise ValueError(f"{what} must be a number of seconds, or None, not {value!r}")


class ThreadWaiter:
    """For one wait of a thread."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()

    def wake(self) -> None:
        """End the wait; the second time, nothing."""
        try:
            self._lock.release()
        except RuntimeError:
            return

    def wait(self, timeout_s: float | None) -> None:
        """Wait until it is woken, at most so long."""
        if timeout_s is None:
            self._lock.acquire()
        else:
            self._lock.acquire(timeout=min(max(timeout_s, 0), threading.TIMEOUT_MAX))


class LoopWaiter:
    """For one wait of a coroutine; any thread may wake it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def wake(self) -> None:
        """End the wait; the second time, nothing."""
        try:
            self._loop.call_soon_threadsafe(self._done)
        except RuntimeError:
            return  # The loop is closed, and nobody waits any more.

    def _done(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout_s: float | None) -> None:
        """Wait until it is woken, at most so long."""
        await asyncio.wait({self._future}, timeout=timeout_s)


async def off_the_loop(function: Callable[[], T]) -> T:
    """Run a function in a thread of its own, which is there for that long only.

    Not in the loop's executor: the program would wait for it at its end. If the coroutine is
    cancelled the thread goes on, and what it returns is dropped.
    """
    waiter = LoopWaiter()
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, function()))
        except BaseException as error:
            # It is the coroutine's.
            outcome.append((False, error))
        waiter.wake()

    try:
        if is_shutting_down():
            raise RuntimeError("no thread can be started any more")
        threading.Thread(target=run, name="torch_utils-host", daemon=True).start()
    except RuntimeError:
        run()
    while not outcome:
        await waiter.wait(None)
    succeeded, value = outcome.pop()
    if not succeeded:
        raise value
    result: T = value
    return result
