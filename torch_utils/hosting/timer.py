"""The one timer of this process: a daemon thread that is there while something is to be done.

It sleeps until the next thing is due, never polls, and ends when nothing is left. It ends before
this process forks, too, if it sleeps: a fork of a process with threads may find locks that nobody
lets go of, of which Python warns from 3.12 on. A fork has none until it needs one.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

from torch_utils._runtime import ERROR, is_shutting_down, log

__all__ = ["TIMER", "Timer"]

JOIN_S = 1.0
"""How long a fork waits at most for the thread's end."""


class Timer:
    """Calls bound methods at given times, one after the other, in a thread of its own.

    Refers to their objects weakly: one that is gone is not called.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(
            before=self._rest, after_in_parent=self._go_on, after_in_child=self._reset
        )

    def _reset(self) -> None:
        self._due: list[tuple[float, int, weakref.WeakMethod[Callable[[], object]]]] = []
        self._late: deque[weakref.WeakMethod[Callable[[], object]]] = deque()
        # Reentrant: a destructor may end a lease at any allocation.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._count = 0
        self._is_calling = False
        self._rests = 0  # forks that are under way

    def call_at(self, when: float, method: Callable[[], object]) -> None:
        """Call a bound method when `time.monotonic` has reached ``when``.

        Not while the program ends: everything is unloaded then, and a thread that is started so
        late would be waited for without end.
        """
        if is_shutting_down():
            return
        with self._lock:
            self._add(when, weakref.WeakMethod(method))

    def call_soon(self, method: Callable[[], object]) -> None:
        """Call a bound method as soon as possible. For destructors: waits for no lock."""
        self._late.append(weakref.WeakMethod(method))
        # Or whoever has the lock sees to it, when it next does something.
        if not is_shutting_down() and self._lock.acquire(blocking=False):
            try:
                self._add_late()
            finally:
                self._lock.release()

    def _add_late(self) -> None:
        while self._late:
            self._add(time.monotonic(), self._late.popleft())

    def _add(self, when: float, method: weakref.WeakMethod[Callable[[], object]]) -> None:
        self._count += 1
        heapq.heappush(self._due, (when, self._count, method))
        if self._thread is None:
            self._start()
        else:
            self._changed.notify()

    def _start(self) -> None:
        if self._rests:
            return
        thread = threading.Thread(target=self._run, name="torch_utils-timer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # The program is about to end.
            return
        self._thread = thread

    def cancel(self, method: Callable[[], object]) -> None:
        """Take back what was to be called; the thread ends if that was all."""
        if is_shutting_down():
            return  # The thread may have been stopped for good, with the lock in its hands.
        with self._lock:
            self._add_late()
            self._due = [one for one in self._due if one[2]() not in (method, None)]
            heapq.heapify(self._due)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._is_calling = False
                method = self._wait()
                if method is None:
                    self._thread = None
                    return
                self._is_calling = True
            call = method()
            if call is not None:
                try:
                    call()
                except Exception as error:
                    # One object's trouble must not keep the others from being called.
                    log(ERROR, "a timer's call failed: %r", error, exc_info=error)
            del call

    def _wait(self) -> weakref.WeakMethod[Callable[[], object]] | None:
        self._add_late()
        while self._due and not self._rests:
            left = self._due[0][0] - time.monotonic()
            if left <= 0 or self._due[0][2]() is None:
                return heapq.heappop(self._due)[2]
            # No lock can wait for longer than this; then it looks again.
            self._changed.wait(min(left, threading.TIMEOUT_MAX))
            self._add_late()
        return None

    def _rest(self) -> None:
        """Before a fork: have the thread end, unless it is at work. Asks no more than a moment."""
        with self._lock:
            self._rests += 1
            thread = self._thread
            if thread is None or self._is_calling or is_shutting_down():
                return
            self._changed.notify()
        # With a limit, for a signal handler may fork while its thread has the lock.
        thread.join(JOIN_S)
        task, tries = Path(f"/proc/self/task/{thread.native_id}"), 100
        while tries and task.exists():  # Before 3.13 the system's thread ends later.
            tries -= 1
            time.sleep(0.0001)

    def _go_on(self) -> None:
        """After a fork, in the parent."""
        with self._lock:
            self._rests -= 1
            if self._due and self._thread is None and not is_shutting_down():
                self._start()


TIMER = Timer()
