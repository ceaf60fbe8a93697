"""Resource among threads and processes: one release, no waiting for ever, none in a child."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
from counted import Counted

from torch_utils._registry import REGISTRY, Claim


def test_second_closer_waits() -> None:
    """A concurrent close returns only when the release is over."""
    started, go = threading.Event(), threading.Event()

    def slow(self: Any) -> None:
        started.set()
        go.wait()
        self.finished = True

    resource = Counted(slow)
    first = threading.Thread(target=resource.close)
    first.start()
    started.wait()
    seen: list[bool] = []
    second = threading.Thread(
        target=lambda: (resource.close(), seen.append(getattr(resource, "finished", False)))
    )
    second.start()
    time.sleep(0.05)
    assert not seen
    assert resource.closed  # For everyone but the thread that is closing it.
    go.set()
    first.join()
    second.join()
    assert (seen, resource.released) == ([True], 1)


def test_close_inside_release_returns() -> None:
    """A closer inside _release, directly or through another resource, does not deadlock."""
    seen: list[bool] = []
    resource = Counted(lambda self: seen.append(self.close() or self.closed))
    resource.close()
    assert seen == [False]
    assert resource.closed


def test_many_closers_one_release() -> None:
    """Eight threads and a signal handler close the same resources; each is released once."""
    resources = [Counted() for _ in range(500)]

    def close_all(*args: object) -> None:
        for resource in resources:
            resource.close()

    def close_all_and_again(*args: object) -> None:
        close_all()
        signal.setitimer(signal.ITIMER_REAL, 0.001)  # Not before: no handler is inside of another.

    before = signal.signal(signal.SIGALRM, close_all_and_again)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        threads = [threading.Thread(target=close_all) for _ in range(8)]
        for thread in threads:
            thread.start()
        close_all()
        for thread in threads:
            thread.join()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert {r.released for r in resources} == {1}


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_fork_never_releases_the_parents() -> None:
    """The child's copy is forgotten; the child's own resources are released in the child."""
    resource = Counted(lambda self: os.write(write, b"parent's"))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        own = Counted(lambda self: os.write(write, b"own,"))
        resource.close()
        own.close()
        os._exit(own.released + 10 * resource.released)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert os.read(read, 100) == b"own,"
    assert resource.close() is True
    assert os.read(read, 100) == b"parent's"
    os.close(read)
    os.close(write)


def test_waiting_in_a_circle_is_seen_however_threads_interleave() -> None:
    """Each thread announces what it waits for before it looks; nobody waits for ever."""
    for count in (2, 3):
        for _ in range(100):
            barrier = threading.Barrier(count)
            ring: list[Counted] = []

            def action(self: Any, barrier: Any = barrier, ring: Any = ring) -> None:
                barrier.wait()
                ring[(ring.index(self) + 1) % len(ring)].close()

            ring += [Counted(action) for _ in range(count)]
            before = sys.getswitchinterval()
            sys.setswitchinterval(1e-6)
            try:
                threads = [threading.Thread(target=r.close, daemon=True) for r in ring]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(60)
                    assert not thread.is_alive(), "deadlock"
            finally:
                sys.setswitchinterval(before)
            assert [r.released for r in ring] == [1] * count


def test_both_look_before_either_waits() -> None:
    """The race itself: both have announced, and are about to look. Neither may wait then."""
    first, second = Claim(-1), Claim(-2)
    REGISTRY._waiting[-1], REGISTRY._waiting[-2] = second, first
    try:
        assert REGISTRY._leads_to(-1, second)
        assert REGISTRY._leads_to(-2, first)
        second.finished = True
        assert not REGISTRY._leads_to(-1, second)
        second.finished = False
        assert not REGISTRY._leads_to(-3, second)  # A circle of others does not hold it up.
    finally:
        del REGISTRY._waiting[-1], REGISTRY._waiting[-2]
