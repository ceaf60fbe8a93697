"""Resource: released exactly once, whatever happens."""

from __future__ import annotations

import abc
import asyncio
import copy
import gc
import logging
import os
import pickle
import signal
import sys
import threading
import time
import tracemalloc
import warnings
from typing import Any

import pytest

from torch_utils import Resource, ResourceClosedError
from torch_utils._registry import REGISTRY, Claim


class Counted(Resource):
    """Counts its releases; optionally does something in them."""

    def __init__(self, action: Any = None) -> None:
        self.released = 0
        self.action = action

    def _release(self) -> None:
        self.released += 1
        if self.action is not None:
            self.action(self)


def test_close_is_idempotent() -> None:
    """The first call releases and says so; the others do nothing."""
    resource = Counted()
    assert not resource.closed
    assert resource.close() is True
    assert resource.close() is False
    assert (resource.closed, resource.released) == (True, 1)
    with pytest.raises(ResourceClosedError, match="this Counted is closed"):
        resource.ensure_open()
    with pytest.raises(ResourceClosedError), resource:
        pass


def test_with_and_async_with() -> None:
    """Both kinds of block close at their end, the asynchronous one also when cancelled."""
    with Counted() as resource:
        assert not resource.closed
    assert resource.released == 1

    async def use(cancelled: bool) -> Counted:
        async with Counted() as inner:
            opened.append(inner)
            if cancelled:
                await asyncio.sleep(100)
        return inner

    async def both() -> None:
        await use(False)
        task = asyncio.create_task(use(True))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await Counted().aclose()

    opened: list[Counted] = []
    asyncio.run(both())
    assert [r.released for r in opened] == [1, 1]


def test_dropped_resource_is_released_then_warns() -> None:
    """The release comes first: under -W error the warning is an exception."""
    order: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *args, **kwargs: order.append(str(message))
        Counted(lambda self: order.append("released"))
        gc.collect()
    assert order[0] == "released"
    assert "unclosed Counted was garbage-collected" in order[1]


def test_closed_resource_does_not_warn() -> None:
    """A resource that was closed goes silently (warnings are errors here)."""
    Counted().close()
    gc.collect()


class HalfBuilt(Resource):
    releases = 0

    def __init__(self) -> None:
        raise ValueError("in the middle")

    def _release(self) -> None:
        HalfBuilt.releases += 1
        self.handle.close()  # type: ignore[attr-defined]


def test_half_built_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    """No warning, no error: nobody ever had the object in hand. It is released all the same."""
    with pytest.raises(ValueError, match="in the middle"):
        HalfBuilt()
    gc.collect()
    assert HalfBuilt.releases == 1
    assert not [r for r in caplog.records if r.levelno > logging.DEBUG]


def test_init_is_marked_built_through_inheritance() -> None:
    """Subclasses with and without __init__, with super() and without, all warn when dropped."""

    class NoInit(Resource):
        def _release(self) -> None:
            pass

    class Child(Counted):
        def __init__(self) -> None:
            super().__init__()

    class Stranger(Counted):
        def __init__(self) -> None:
            self.released, self.action = 0, None

    for kind in (NoInit, Child, Stranger, Counted):
        with pytest.warns(ResourceWarning, match=f"unclosed {kind.__name__}"):
            kind()


def test_release_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An error in _release does not get out, and is seen once in the log."""

    def fail(self: Any) -> None:
        raise ValueError("no")

    resource = Counted(fail)
    assert resource.close() is False
    assert resource.closed
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1
    assert "releasing Counted failed: ValueError('no')" in caplog.text


def test_interrupt_gets_through() -> None:
    """KeyboardInterrupt out of a release reaches the caller; the resource is closed."""

    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    resource = Counted(interrupt)
    with pytest.raises(KeyboardInterrupt):
        resource.close()
    assert resource.closed
    with pytest.raises(KeyboardInterrupt), Counted(interrupt):
        pass
    with pytest.raises(ValueError, match="mine") as caught, Counted(interrupt):
        raise ValueError("mine")
    assert "releasing Counted also failed" in caught.value.__notes__[0]


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


def test_two_that_close_each_other() -> None:
    """Two threads, each closing a resource whose release closes the other's."""
    for _ in range(50):
        barrier = threading.Barrier(2)
        pair: list[Counted] = []

        def action(self: Any, barrier: Any = barrier, pair: Any = pair) -> None:
            barrier.wait()
            pair[self is pair[0]].close()

        pair += [Counted(action), Counted(action)]
        threads = [threading.Thread(target=r.close, daemon=True) for r in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive(), "deadlock"
        assert [r.released for r in pair] == [1, 1]


def test_many_closers_one_release() -> None:
    """Eight threads and a signal handler close the same resources; each is released once."""
    resources = [Counted() for _ in range(500)]

    def close_all(*args: object) -> None:
        for resource in resources:
            resource.close()

    before = signal.signal(signal.SIGALRM, close_all)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        threads = [threading.Thread(target=close_all) for _ in range(8)]
        for thread in threads:
            thread.start()
        close_all()
        for thread in threads:
            thread.join()
    finally:
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


@pytest.mark.parametrize("use", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(use: Any) -> None:
    """Two owners cannot each close one thing."""
    with (
        Counted() as resource,
        pytest.raises(TypeError, match=r"Counted cannot be (copied|pickled)"),
    ):
        use(resource)


def test_release_must_be_overridden() -> None:
    """A class without _release is refused when it is used, not when it is too late."""

    class Empty(Resource):
        pass

    with pytest.raises(TypeError, match=r"Empty must override _release\(\)"):
        Empty()


def test_combines_with_other_bases() -> None:
    """__slots__, ABCs and classes that clear their own dictionary."""

    class Slots(Resource):
        __slots__ = ("value",)

        def _release(self) -> None:
            self.value = "released"

    class Abstract(abc.ABC):
        @abc.abstractmethod
        def work(self) -> None: ...

    class Both(Resource, Abstract):
        def work(self) -> None: ...

        def _release(self) -> None:
            self.__dict__.clear()

    with Slots() as slots:
        assert not hasattr(slots, "__dict__")
    assert slots.value == "released"
    with Both() as both:
        both.x = 1
    assert both.closed
    with pytest.raises(TypeError, match="abstract"):
        type("Missing", (Resource, Abstract), {"_release": lambda self: None})()


def test_a_million_resources_leave_nothing() -> None:
    """No memory stays behind, and the registry is as it was (a tenth of the million here)."""
    with Counted():
        registered = len(REGISTRY)
        tracemalloc.start()
        try:
            for _ in range(1000):
                Counted().close()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(10_000):
                Counted().close()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        for _ in range(100_000):
            Counted().close()
        assert len(REGISTRY) == registered
        assert grown < 2000, grown


class Model(Counted):
    """What a framework keeps; see `test_frameworks_that_call_the_destructor`."""


def test_frameworks_that_call_the_destructor() -> None:
    """Ray Serve calls __del__ itself, in another thread, and then drops the model: no warning."""
    kept = [Model()]
    released: list[int] = []
    kept[0].action = lambda self: released.append(1)
    thread = threading.Thread(target=kept[0].__del__)
    thread.start()
    thread.join()
    assert kept[0].closed
    kept.clear()
    del thread
    gc.collect()
    assert released == [1]
    with pytest.warns(ResourceWarning, match="unclosed Model"):  # The control: dropped, as it is.
        Model()
    with pytest.warns(ResourceWarning, match="unclosed Model"):
        cycle = Model()
        cycle.me = cycle
        del cycle
        gc.collect()


def test_ray_ends_an_actor_in_order() -> None:
    """Ray calls a method of this name."""
    resource = Counted()
    resource.__ray_shutdown__()
    assert (resource.closed, resource.released) == (True, 1)


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
