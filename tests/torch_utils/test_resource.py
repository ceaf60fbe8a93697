"""Tests of Resource: each release runs exactly once, at exit at the latest."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="arg-type, attr-defined, call-arg, func-returns-value, has-type"

import contextlib
import copy
import gc
import inspect
import pickle
import signal
import sqlite3
import sys
import threading
import time
import tracemalloc
import warnings
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
    order: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *args, **kwargs: order.append(str(message))
        Counted(lambda self: order.append("released"))
        gc.collect()
    assert order[0] == "released"
    assert "unclosed Counted was garbage-collected" in order[1]
    Counted().close()  # This one does not warn: warnings are errors here.
    gc.collect()


@pytest.fixture
def lost_errors(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Return the types of the errors that reach `sys.unraisablehook`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # What other tests have left.
    seen: list[type] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: seen.append(lost.exc_type))
    return seen


class HalfBuilt(Resource):
    """Its ``__init__`` raises, and perhaps its `_release`."""

    def __init__(self, releases: list[int], release_fails: bool) -> None:
        self.releases, self.release_fails = releases, release_fails
        raise ValueError("in the middle")

    def _release(self) -> None:
        self.releases.append(1)
        if self.release_fails:
            raise OSError("no")


class Decorated(HalfBuilt):
    @closes_on_error
    def __init__(self, releases: list[int], *, release_fails: bool) -> None:
        super().__init__(releases, release_fails)


@pytest.mark.parametrize("release_fails", [False, True])
def test_object_is_closed_once_after_failed_init(
    release_fails: bool, lost_errors: list[type]
) -> None:
    """By its destructor, which warns, or at once by `closes_on_error`."""
    releases: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="in the middle"):
            HalfBuilt(releases, release_fails)
        gc.collect()
    assert releases == [1]
    found = [*lost_errors, *(warning.category for warning in caught)]
    assert found == [OSError if release_fails else ResourceWarning]
    lost_errors.clear()
    with pytest.raises(ValueError, match="in the middle") as raised:
        Decorated(releases, release_fails=release_fails)
    assert releases == [1, 1]  # The traceback still holds the object.
    notes = ["releasing Decorated also failed: OSError('no')"] * release_fails
    assert getattr(raised.value, "__notes__", []) == notes
    del raised
    gc.collect()
    assert (releases, lost_errors) == ([1, 1], [])  # A warning would be an error here, and lost.
    assert list(inspect.signature(Decorated).parameters) == ["releases", "release_fails"]


async def end_async_block(resource: Resource, error: BaseException | None) -> None:
    async with resource:
        if error is not None:
            raise error


def end(resource: Resource, how: str, error: BaseException | None = None) -> None:
    """Close a resource in one of the four ways, the blocks with an error."""
    if how == "close":
        resource.close()
    elif how == "with":
        with resource:
            if error is not None:
                raise error
    else:
        to_close = resource.aclose() if how == "aclose" else end_async_block(resource, error)
        with contextlib.suppress(StopIteration):  # `asyncio.run` would handle SIGINT itself.
            to_close.send(None)


def failing(error: BaseException) -> Counted:
    def fail(self: Any) -> None:
        raise error

    return Counted(fail)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("how", ["close", "aclose", "with", "async with"])
def test_close_raises_error_of_release_and_is_closed(how: str, kind: type[BaseException]) -> None:
    error = kind("no")
    resource = failing(error)
    with pytest.raises(kind) as caught:
        end(resource, how)
    assert caught.value is error
    assert resource.close() is False
    assert (resource.closed, resource.released) == (True, 1)


@pytest.mark.parametrize("how", ["with", "async with"])
def test_exception_of_the_block_wins_over_errors_but_not_over_an_exit(how: str) -> None:
    error = KeyError("mine")
    with pytest.raises(SystemExit) as exits:
        end(failing(SystemExit("no")), how, error)
    assert exits.value.__context__ is error
    error = KeyError("mine")
    resource = failing(ValueError("no"))
    with pytest.raises(KeyError, match="mine") as caught:
        end(resource, how, error)
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    assert error.__notes__ == ["releasing Counted also failed: ValueError('no')"]
    assert (resource.closed, resource.released) == (True, 1)


def test_class_must_override_release_and_not_close() -> None:
    with pytest.raises(TypeError, match=r"Empty must override _release\(\)"):
        type("Empty", (Resource,), {})()

    def close(self: Any) -> None: ...

    mixin = type("Mixin", (), {"close": close})
    for bases, contents in (((Resource,), {"close": close}), ((mixin, Resource), {})):
        with pytest.raises(TypeError, match=r"Own must not override close\(\).*_release\(\)"):
            type("Own", bases, {"_release": lambda self: None, **contents})


@pytest.mark.filterwarnings("error")
def test_class_with_an_async_or_generator_release_is_refused() -> None:
    """At exit, nothing could await it."""

    async def coroutine(self: Any) -> None: ...

    def generator(self: Any) -> Any:
        yield

    async def both(self: Any) -> Any:
        yield

    for function in (coroutine, generator, both):
        with pytest.raises(TypeError, match=r"Late._release\(\) must be a plain function"):
            type("Late", (Resource,), {"_release": function})
    returns = type("Late", (Resource,), {"_release": lambda self: coroutine(self)})()
    with pytest.raises(TypeError, match="has to be awaited"):
        returns.close()
    assert returns.closed


def test_base_with_a_close_before_resource_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match="put Resource before it"):
        type("Database", (sqlite3.Connection, Resource), {"_release": lambda self: None})
    kind: Any = type(
        "Database", (Resource, sqlite3.Connection), {"_release": sqlite3.Connection.close}
    )
    with kind(":memory:") as database:
        database.execute("select 1")
    with pytest.raises(sqlite3.ProgrammingError):
        database.execute("select 1")


def test_resource_cannot_be_copied() -> None:
    for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
        with Counted() as resource, pytest.raises(TypeError, match="cannot"):
            make_copy(resource)


def test_resource_combines_with_slots() -> None:
    class Slots(Resource):
        __slots__ = ("value",)

        def _release(self) -> None:
            self.value = "released"

    with Slots() as slots:
        assert not hasattr(slots, "__dict__")
    assert slots.value == "released"


def test_closed_resources_are_freed() -> None:
    def open_and_close() -> int:
        for _ in range(1000):
            Counted().close()
        return tracemalloc.get_traced_memory()[0]

    with Counted():
        open_and_close()
        tracemalloc.start()
        try:
            before = open_and_close()
            assert open_and_close() - before < 2000
        finally:
            tracemalloc.stop()


class Model(Counted):
    """A model that a framework keeps."""


def test_explicit_del_call_closes_once() -> None:
    """Ray Serve calls `__del__` in another thread and then drops the model."""
    kept = [Model()]
    released: list[int] = []
    kept[0].action = lambda self: released.append(1)
    with pytest.warns(ResourceWarning, match="unclosed Model"):
        in_threads(kept[0].__del__)
    assert kept[0].closed
    kept.clear()
    gc.collect()
    assert released == [1]
    with pytest.warns(ResourceWarning, match="unclosed Model"):
        cycle = Model()
        cycle.me = cycle
        del cycle
        gc.collect()
    actor = Model()
    actor.__ray_shutdown__()  # Ray calls this when an actor ends in order.
    assert actor.released == 1


# Threads and processes


def test_other_closers_wait_for_the_first() -> None:
    order: list[Any] = []

    def slow(self: Any) -> None:
        time.sleep(1.5)  # One that did not wait, or not for long, would have ended by then.
        order.extend(in_threads(lambda: "closed" if self.closed else "open"))

    def close() -> None:
        order.append(resource.close())

    resource = Counted(slow)
    in_threads(*[close] * 4)
    assert order[0] == "closed"  # For all but the thread that is closing it.
    assert sorted(order[1:]) == [False, False, False, True]
    assert (resource.released, resource.closed) == (1, True)


@pytest.mark.slow  # The threads wait for each other for 10 s.
def test_two_threads_whose_resources_close_each_other_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        assert in_threads(*[close_all] * 4) == [None] * 4
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert {r.released for r in resources} == {1}


# The end of a program

EXIT = """
import atexit, gc
from torch_utils import Resource, is_shutting_down

class R(Resource):
    def __init__(self, n):
        self.n = n
    def _release(self):
        import json  # Every module is intact.
        print(self.n, is_shutting_down(), json.dumps(1), flush=True)
"""


def test_exit_closes_newest_first_after_the_users_callbacks() -> None:
    output = output_of(
        EXIT
        + """
class Opens(R):  # What is opened while everything is closed is closed as well.
    def _release(self):
        super()._release()
        if self.n: kept.append(Opens(self.n - 1))
a, b, c, kept = R("a"), R("b"), R("c"), []
kept.append(Opens(2))
b.close()
class D(R):
    close_at_exit = False
d = D("left to the program")
atexit.register(lambda: print("open" if not a.closed else "closed", is_shutting_down()))
"""
    )
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
    def __init__(self, name):
        self.name = name
    def _release(self):
        begun.set()
        time.sleep(0.5)  # The exit callback runs meanwhile.
        print(self.name, flush=True)

gc.disable()
begun = threading.Event()
one, two = R("one"), R("two")
one.other, two.other = two, one
del one, two
threading.Thread(target=gc.collect, daemon=True).start()
begun.wait()
""")
    assert result.returncode == 0, str(result)
    assert sorted(result.stdout.split()) == ["one", "two"]
