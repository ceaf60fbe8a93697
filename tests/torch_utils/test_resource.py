"""Resource: released exactly once, whatever happens."""

from __future__ import annotations

import abc
import asyncio
import copy
import gc
import logging
import pickle
import threading
import tracemalloc
import warnings
from typing import Any

import pytest
from counted import Counted

from torch_utils import Resource, ResourceClosedError
from torch_utils._registry import REGISTRY


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


@pytest.mark.slow
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


def test_a_release_that_runs_later_is_refused() -> None:
    """A coroutine that nobody awaits would release nothing, and `close` would say True."""

    async def coroutine(self: Any) -> None: ...

    def generator(self: Any) -> Any:
        yield

    async def both(self: Any) -> Any:
        yield

    for function in (coroutine, generator, both):
        with pytest.raises(TypeError, match=r"Late\._release must be a plain function"):
            type("Late", (Resource,), {"_release": function})
        mixin = type("Mixin", (), {"_release": function})
        with pytest.raises(TypeError, match=r"Late\._release must be a plain function"):
            type("Late", (mixin, Resource), {})


def test_a_release_that_returns_a_coroutine_has_failed() -> None:
    """Nobody awaits it: that is logged as any failure is, and nothing is left to warn."""

    async def later() -> None: ...

    class Late(Resource):
        def _release(self) -> Any:
            return later()

    resource = Late()
    assert not resource.close()
    assert resource.closed
