"""Tests of Resource: each release runs exactly once, at exit at the latest."""

import asyncio
import copy
import gc
import inspect
import os
import pickle
import signal
import sqlite3
import threading
import time
from functools import partial
from typing import Any

import pytest

from tests.support.counted_resource import Counted
from tests.support.programs import TIMEOUT_S, output_of, run
from tests.support.threads import in_threads
from torch_utils import Resource, ResourceClosedError, closes_on_error

pytestmark = pytest.mark.usefixtures("frozen_heap")


def test_close_runs_release_once() -> None:
    inside: list[bool] = []
    resource = Counted(lambda self: inside.append(self.close() or self.closed))
    assert not resource.closed
    assert resource.close() is True
    assert inside == [False], "a call inside of the release returns at once"
    assert resource.close() is False
    assert (resource.closed, resource.released) == (True, 1)
    with pytest.raises(ResourceClosedError, match="this Counted is closed"):
        resource.ensure_open()
    with pytest.raises(ResourceClosedError), resource:
        pass


def test_dropped_resource_is_released_and_then_warns() -> None:
    before: list[int] = []
    with pytest.warns(ResourceWarning, match="unclosed Counted was garbage-collected") as caught:
        Counted(lambda self: before.append(len(caught)))
        gc.collect()
    assert (before, len(caught)) == ([0], 1)
    Counted().close()  # This one does not warn: warnings are errors here.
    gc.collect()


class HalfBuilt(Resource):
    def __init__(self, releases: list[int]) -> None:
        self.releases = releases
        raise ValueError("in the middle")

    def _release(self) -> None:
        self.releases.append(1)


class Decorated(HalfBuilt):
    @closes_on_error
    def __init__(self, releases: list[int]) -> None:
        super().__init__(releases)

    def _release(self) -> None:
        super()._release()
        raise OSError("no")


def test_object_is_closed_once_after_failed_init() -> None:
    """By its destructor, which warns, or at once by `closes_on_error`."""
    releases: list[int] = []
    with pytest.warns(ResourceWarning, match="unclosed HalfBuilt"):
        with pytest.raises(ValueError, match="in the middle"):
            HalfBuilt(releases)
        gc.collect()
    assert releases == [1]
    with pytest.raises(ValueError, match="in the middle") as raised:
        Decorated(releases)
    assert releases == [1, 1]  # The traceback still holds the object.
    assert raised.value.__notes__ == ["releasing Decorated also failed: OSError('no')"]
    del raised
    gc.collect()  # A warning would be an error here.
    assert releases == [1, 1]
    assert list(inspect.signature(Decorated).parameters) == ["releases"]


async def end_async_block(resource: Resource, error: BaseException | None) -> None:
    async with resource:
        if error is not None:
            raise error


def end(resource: Resource, how: str, error: BaseException | None = None) -> None:
    """Close a resource in one of the four ways, the blocks with an error."""
    if how == "close":
        resource.close()
    elif how == "aclose":
        asyncio.run(resource.aclose())
    elif how == "async with":
        asyncio.run(end_async_block(resource, error))
    else:
        with resource:
            if error is not None:
                raise error


@pytest.mark.parametrize("how", ["close", "aclose", "with", "async with"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_close_raises_error_of_release_and_is_closed(how: str, kind: type[BaseException]) -> None:
    error = kind("no")
    resource, handler = Counted(error), signal.getsignal(signal.SIGINT)
    with pytest.raises(kind) as caught:
        end(resource, how)
    assert caught.value is error
    assert resource.close() is False
    assert (resource.closed, resource.released) == (True, 1)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("how", ["with", "async with"])
def test_exception_of_the_block_wins_over_errors_but_not_over_an_exit(how: str) -> None:
    error = KeyError("mine")
    with pytest.raises(SystemExit) as exits:
        end(Counted(SystemExit("no")), how, error)
    assert exits.value.__context__ is error
    error = KeyError("mine")
    with pytest.raises(KeyError, match="mine") as caught:
        end(Counted(ValueError("no")), how, error)
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    assert error.__notes__ == ["releasing Counted also failed: ValueError('no')"]


def test_class_must_override_release_and_not_close() -> None:
    with pytest.raises(TypeError, match=r"Empty must override _release\(\)"):
        type("Empty", (Resource,), {})()
    for bases, own in (((Resource,), {"close": print}), ((sqlite3.Connection, Resource), {})):
        with pytest.raises(TypeError, match=r"not override close\(\).*put Resource before it"):
            type("Own", bases, {"_release": print, **own})
    close = sqlite3.Connection.close
    kind: Any = type("Database", (Resource, sqlite3.Connection), {"_release": close})
    with kind(":memory:") as database:
        database.execute("select 1")
    with pytest.raises(sqlite3.ProgrammingError):
        database.execute("select 1")


@pytest.mark.filterwarnings("error")
def test_class_with_an_async_or_generator_release_is_refused() -> None:
    """At exit, nothing could await it."""

    async def coroutine(self: Any) -> None: ...

    def generator(self: Any) -> Any:
        yield

    for function in (coroutine, generator):
        with pytest.raises(TypeError, match=r"Late._release\(\) must be a plain function"):
            type("Late", (Resource,), {"_release": function})
    returns = type("Late", (Resource,), {"_release": lambda self: coroutine(self)})()
    with pytest.raises(TypeError, match="has to be awaited"):
        returns.close()
    assert returns.closed


def test_resource_cannot_be_copied() -> None:
    for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
        with Counted() as resource, pytest.raises(TypeError, match="cannot"):
            make_copy(resource)


def test_closed_resources_are_freed() -> None:
    with Counted():
        before = len(gc.get_objects())
        for resource in [Counted() for _ in range(1000)]:
            resource.close()
        assert len(gc.get_objects()) - before < 100


def test_explicit_del_call_closes_once() -> None:
    """Ray Serve calls `__del__` in another thread and then drops the model."""
    released: list[int] = []
    kept = [Counted(lambda self: released.append(1))]
    with pytest.warns(ResourceWarning, match="unclosed Counted"):
        in_threads(kept[0].__del__)
    assert kept[0].closed
    kept.clear()
    gc.collect()
    assert released == [1]
    actor = Counted()
    actor.__ray_shutdown__()  # Ray calls this when an actor ends in order.
    assert actor.released == 1


# Threads and processes


def test_other_closers_wait_for_the_first() -> None:
    order: list[Any] = []

    def slow(self: Any) -> None:
        time.sleep(0.5)  # One that did not wait would have ended by then.
        order.extend(in_threads(lambda: "closed" if self.closed else "open"))

    resource = Counted(slow)
    in_threads(*[lambda: order.append(resource.close())] * 4)
    assert order[0] == "closed"  # For all but the thread that is closing it.
    assert sorted(order[1:]) == [False, False, False, True]
    assert (resource.released, resource.closed) == (1, True)


@pytest.mark.slow  # The threads wait for each other for 10 s.
def test_two_threads_whose_resources_close_each_other_end(caplog: pytest.LogCaptureFixture) -> None:
    def close_other(self: Counted) -> None:
        both_close.wait(TIMEOUT_S)
        (second if self is first else first).close()

    both_close, first, second = threading.Barrier(2), Counted(close_other), Counted(close_other)
    assert in_threads(first.close, second.close) == [True, True]
    assert (first.released, second.released) == (1, 1)
    assert "another thread is still closing Counted" in caplog.text


@pytest.mark.usefixtures("hasty")
def test_threads_and_a_signal_handler_release_each_once() -> None:
    resources = [Counted() for _ in range(1000)]

    def close_all(*args: object) -> None:
        for resource in resources:
            resource.close()

    before = signal.signal(signal.SIGALRM, close_all)
    try:
        kill = partial(os.kill, os.getpid(), signal.SIGALRM)  # The main thread handles it.
        assert in_threads(*[close_all] * 4, kill) == [None] * 5
    finally:
        signal.signal(signal.SIGALRM, before)
    assert {r.released for r in resources} == {1}


# The end of a program


def test_exit_closes_newest_first_after_the_users_callbacks() -> None:
    output = output_of("""
    import atexit
    from torch_utils import Resource, is_shutting_down
    class R(Resource):
        def __init__(self, name):
            self.name = name
        def _release(self):
            import json  # Every module is intact.
            print(self.name, is_shutting_down(), json.dumps(1), flush=True)
    class Opens(R):  # What is opened while everything is closed is closed as well.
        def _release(self):
            super()._release()
            if self.name: kept.append(Opens(self.name - 1))
    class Stays(R):
        close_at_exit = False
    a, b, c, kept, d = R("a"), R("b"), R("c"), [Opens(2)], Stays("left to the program")
    b.close()
    atexit.register(lambda: print("open" if not a.closed else "closed", is_shutting_down()))
    """)
    lines = output.splitlines()
    late = ["0 True 1", "1 True 1"]
    order = ["b False 1", "open False", "2 True 1", "c True 1", "a True 1"]
    assert [line for line in lines if line not in late] == order
    assert sorted(lines) == sorted([*order, *late])


def test_cycle_that_a_daemon_thread_collects_at_exit_is_released_once() -> None:
    result = run("""
    import gc, threading, time
    from torch_utils import Resource
    class R(Resource):
        def _release(self):
            begun.set()
            time.sleep(0.3)  # The exit callback runs meanwhile.
            print("released", flush=True)
    gc.disable()
    begun, one, two = threading.Event(), R(), R()
    one.other, two.other = two, one
    del one, two
    threading.Thread(target=gc.collect, daemon=True).start()
    begun.wait()
    """)
    assert (result.returncode, result.stdout) == (0, "released\n" * 2), str(result)
