"""The threads that hosting starts: workers for coroutines, and one that waits for idle models."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch_utils._runtime import ERROR, is_shutting_down, log
from torch_utils._signals import DeferredSignals
from torch_utils.hosting.state_machine import CHANGED, Request, StateMachine

__all__ = [
    "LONGEST_WAIT_S",
    "Expiry",
    "in_thread",
    "run_in_thread",
    "wait_in_loop",
    "wait_in_thread",
]

T = TypeVar("T")
Queue = SimpleQueue[Any]

LONGEST_WAIT_S = 3600.0
"""The longest single wait in seconds; the system limits it. Longer waits repeat."""
WORKER_IDLE_S = 10.0
"""How long a worker waits for another function, in seconds."""
_IDLE: list[Queue] = []
"""The queues of workers that wait for a function."""


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a daemon thread, which nothing waits for at the end of the loop.

    It sees the caller's context variables, as with `asyncio.to_thread`. A thread that has run a
    function waits for another one. Starting a thread takes longer than the call of a small model,
    and torch keeps memory for each thread that computes.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # Cancelling a waiter must not cancel it.
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:  # The waiter raises it.
            future.set_exception(error)

    has_thread = True
    with DeferredSignals():
        try:
            _IDLE.pop().put(run)
        except IndexError:
            jobs = Queue()
            jobs.put(run)
            try:
                threading.Thread(None, _work, "torch_utils-host", (jobs,), daemon=True).start()
            except RuntimeError:  # Too many threads, or the interpreter is ending.
                has_thread = False
    if not has_thread:
        run()
    return future


def _work(jobs: Queue) -> None:
    while True:
        try:
            jobs.get(timeout=WORKER_IDLE_S)()
            _IDLE.append(jobs)
        except Empty:
            with contextlib.suppress(ValueError):  # A function is about to come.
                _IDLE.remove(jobs)
                return


def wait_in_thread(future: Future[Any], timeout_s: float | None = None) -> None:
    """Wait until a future is done. An interrupt of `concurrent.futures.wait` may break its lock."""
    waiter = threading.Lock()
    waiter.acquire()
    with DeferredSignals():
        future.add_done_callback(lambda _: waiter.release())
    waiter.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))


async def run_in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread, which continues if the coroutine is cancelled."""
    future = in_thread(function)
    await wait_in_loop(future)
    return future.result()


async def wait_in_loop(future: Future[Any], timeout_s: float | None = None) -> None:
    """Wait until a future is done. A StopIteration in it would make its own waiters hang."""
    signal: Future[None] = Future()
    signal.set_running_or_notify_cancel()  # Cancelling the waiter must not cancel it.
    weak = weakref.ref(signal)  # A coroutine of a loop that has gone must not stay alive.

    def done(_: object) -> None:
        waiter = weak()
        if waiter is not None:
            waiter.set_result(None)

    future.add_done_callback(done)
    waiting = asyncio.wrap_future(signal)
    try:
        await asyncio.wait({waiting}, timeout=timeout_s)
    finally:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            waiting.cancel()


class Expiry:
    """A thread that ends dropped leases of a host, and measures and unloads its models when due.

    It ends when there is no model, and does not keep the host alive.
    """

    def __init__(self, host: Any) -> None:
        self._dropped: Queue = Queue()
        self._host = weakref.ref(host)
        self._is_running = False

    def end_later(self, request: Request) -> None:
        """End a lease that was garbage-collected, whose destructor must not block."""
        self._dropped.put(request)

    def look(self) -> None:
        """Look now at what is due, if the thread runs."""
        if self._is_running:
            self._dropped.put(None)

    def start(self, machine: StateMachine) -> None:
        """Start the thread, unless it runs."""
        # Nothing is due earlier. A thread that looked at once might close a model of a pool before
        # newer ones.
        wait_s = min(machine.keep_alive_s or LONGEST_WAIT_S, LONGEST_WAIT_S)
        thread = threading.Thread(None, self._run, "torch_utils-expiry", (wait_s,), daemon=True)
        with CHANGED:
            if not self._is_running and not is_shutting_down():
                # Too many threads: a pool, `unload` or the exit unloads the model.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._is_running = True

    def _run(self, wait_s: float) -> None:
        while True:
            request = None
            with contextlib.suppress(Empty):
                request = self._dropped.get(timeout=wait_s)
            host = self._host()
            if host is None:
                return
            machine = host._machine
            try:
                if request is not None:
                    machine.end_lease(request)
                host._do_what_is_due()
            except BaseException as error:  # From the model's close(); the model is gone.
                log(ERROR, "unloading an idle model failed: %r", error, exc_info=error)
            del host, request
            with CHANGED:
                has_none = machine.loaded is None or machine.loaded.is_asleep
                if has_none and not machine.replaced:
                    self._is_running = False
                    return
                wait_s = machine.keep_alive_s or LONGEST_WAIT_S  # Leases do not wake the thread.
                if machine.is_idle():
                    wait_s = max(0.0, machine.expires_at() - time.monotonic())
                until_measured_s = machine.next_measurement() - time.monotonic()
                wait_s = max(0.0, min(wait_s, until_measured_s, LONGEST_WAIT_S))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_IDLE.clear)
