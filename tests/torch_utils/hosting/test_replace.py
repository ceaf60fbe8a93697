"""Tests of new versions of a model: `ModelHost.replace`, and unloads that wait for leases."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, arg-type"

import asyncio
import contextlib
import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.support import hosted_models
from tests.support.hosting_stub import Stub, run
from tests.support.interrupts import Interrupt
from tests.support.programs import assert_clean, run_forked
from tests.support.threads import errors_in_threads, in_threads
from tests.support.waiting import wait_for
from torch_utils import (
    ModelHost,
    ModelInUseError,
    ModelPool,
    NoRoomError,
    ResourceClosedError,
    TorchUtilsError,
)

BOTH = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one_at_a_time"])
WAIT_S = 60.0
MB = 1 << 20


class Version(Stub):
    """A model of a version."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number

    def check(self) -> int:
        assert self.use()
        time.sleep(0.0002)
        assert self.use()
        return self.number


def version(number: int) -> Callable[[], Version]:
    return partial(Version, number)


def lent(host: ModelHost[Any]) -> int:
    with host.lease(timeout_s=WAIT_S) as model:
        return int(model.check())


@pytest.fixture
def host() -> Iterator[ModelHost[Any]]:
    with ModelHost(version(1), name="model") as host:
        assert lent(host) == 1
        yield host


def open_models() -> list[int]:
    return [model.number for model in Stub.made if not model.closed]


def test_old_model_serves_until_its_last_lease_ends(host: ModelHost[Any]) -> None:
    """New leases get the new one meanwhile."""
    with host.lease() as old:
        for number in (2, 3):
            assert host.replace(version(number), timeout_s=WAIT_S)
            assert (lent(host), old.check(), host.status().leases) == (number, 1, 1)
        assert open_models() == [1, 3]
    wait_for(lambda: host.status().unloads == 2)
    assert (open_models(), host.status().loads) == ([3], 3)
    host.unload()
    assert lent(host) == 3  # The next load is the new one, too.


def test_model_can_be_replaced_from_coroutines() -> None:
    async def main() -> None:
        async with ModelHost(version(1)) as host:
            async with host.alease() as old:
                assert await host.areplace(version(2), timeout_s=WAIT_S)
                assert (await host.call(Version.check), old.check()) == (2, 1)
                with pytest.raises(ModelInUseError, match="in main, by a coroutine"):
                    await host.areplace(version(3), overlap=False)  # It would wait for this lease.
            async with host.alease() as old:
                swap = partial(host.replace, version(3), overlap=False)
                replaced = asyncio.create_task(asyncio.to_thread(swap))
                await asyncio.sleep(0.05)
                waiting = asyncio.create_task(host.call(Version.check, timeout_s=WAIT_S))
                async with host.alease(timeout_s=WAIT_S) as inner:  # of the same task
                    assert inner is old
                assert not waiting.done() and not replaced.done()
            assert await replaced and await waiting == 3

    run(main)
    assert open_models() == []


def test_without_overlap_only_one_model_is_in_memory(host: ModelHost[Any]) -> None:
    """Open leases end first, at most until the deadline, and new ones wait for the new model."""
    most: list[int] = []

    def load() -> Version:
        most.append(len(open_models()))
        return Version(2)

    with host.lease() as old:
        with pytest.raises(ModelInUseError, match="in test_without_overlap"):
            host.replace(load, overlap=False)
        with pytest.raises(ModelInUseError):
            host.unload(timeout_s=WAIT_S)  # It would wait for its own lease.
        errors = errors_in_threads(
            partial(host.replace, load, overlap=False, timeout_s=0.05),
            partial(host.unload, timeout_s=0.05),
        )
        assert [type(error) for error in errors] == [TimeoutError, ModelInUseError]
        assert "model has 1 open lease" in str(errors[1])
        swap = threading.Thread(target=partial(host.replace, load, overlap=False))
        swap.start()

        def has_to_wait() -> bool:
            with contextlib.suppress(TimeoutError), host.lease(timeout_s=0.01):
                return False
            return True

        wait_for(lambda: in_threads(has_to_wait) == [True])  # The other one waits for this lease.
        assert lent(host) == 1  # An inner lease of the same thread does not wait for itself.
        assert (old.check(), most) == (1, [])
    assert lent(host) == 2
    swap.join()
    wait_for(lambda: open_models() == [2])
    assert most == [0]


@BOTH
def test_failed_load_leaves_the_old_model(host: ModelHost[Any], overlap: bool) -> None:
    with pytest.raises(ZeroDivisionError):
        host.replace(lambda: 1 / 0, overlap=overlap)
    assert "ZeroDivisionError" in str(host.status().last_error)
    assert lent(host) == 1
    assert host.status().loads == 1 + (not overlap)
    with pytest.raises(TypeError, match="has to be awaited"):
        host.replace(lambda: asyncio.sleep(0), overlap=overlap, timeout_s=WAIT_S)
    with pytest.raises(TypeError, match="plain function"):
        host.replace(asyncio.sleep, overlap=overlap)
    with pytest.raises(ValueError, match="timeout_s must"):
        host.replace(version(2), timeout_s=-1)
    assert lent(host) == 1


@BOTH
def test_old_model_stays_at_the_deadline(overlap: bool) -> None:
    """What the load returns later is dropped, and counts until then; also after a cancellation."""
    go_on = threading.Event()

    def load() -> Version:
        go_on.wait()
        return Version(2)

    async def cancel() -> None:
        task = asyncio.create_task(host.areplace(load, overlap=overlap))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])

    with ModelPool(max_loaded=3) as pool:
        host, other = pool.add("model", version(1)), pool.add("other", version(1))
        assert lent(host) == 1
        with pytest.raises(TimeoutError, match=r"model was not replaced within 0\.05 s"):
            host.replace(load, overlap=overlap, timeout_s=0.05)
        assert lent(host) == 1
        asyncio.run(cancel())
        with host.lease() as model, pytest.raises(NoRoomError):
            assert model.check() == 1
            other.lease(timeout_s=0.05).__enter__()
        go_on.set()
        wait_for(lambda: [one.closed for one in Stub.made if one.number == 2] == [1, 1])
        assert lent(host) == lent(other) == 1
        assert host.replace(version(3), overlap=overlap)
        assert (lent(host), open_models()) == (3, [1, 3])


def test_model_that_is_not_loaded_is_not_loaded() -> None:
    """One that loads at that moment is replaced."""
    with ModelHost(version(1)) as host:
        assert not host.replace(version(2))
        assert Stub.made == []
        assert lent(host) == 2
    go_on = threading.Event()
    with ModelHost(lambda: (go_on.wait(), Version(1))[1]) as host:
        load = threading.Thread(target=host.load)
        load.start()
        wait_for(lambda: host.state == "loading")
        with pytest.raises(TimeoutError, match=r"still loading|was not replaced within"):
            host.replace(version(2), timeout_s=0.02)
        results = in_threads(go_on.set, partial(host.replace, version(2)))
        load.join()
        assert (results[1], lent(host)) == (True, 2)


def test_idle_model_may_go_while_its_replacement_loads() -> None:
    def load() -> Version:
        assert lent(host) == 1
        wait_for(lambda: host.status().state == "unloaded")
        return Version(2)

    with ModelHost(version(1), keep_alive=0) as host:
        host.load()
        assert host.replace(load)
        assert lent(host) == 2
        wait_for(lambda: open_models() == [])


@BOTH
def test_close_waits_for_a_replacement(host: ModelHost[Any], overlap: bool) -> None:
    loads, go_on = threading.Event(), threading.Event()

    def load() -> Version:
        loads.set()
        go_on.wait()
        return Version(2)

    def close() -> None:
        loads.wait()
        threading.Timer(0.05, go_on.set).start()
        host.close()

    errors = errors_in_threads(partial(host.replace, load, overlap=overlap), close)
    assert [type(error) for error in errors] == [ResourceClosedError]
    assert (host.status().state, open_models(), Stub.made[-1].closed) == ("closed", [], 1)
    with pytest.raises(ResourceClosedError):
        host.replace(version(3))


def test_load_function_must_return_another_model(host: ModelHost[Any]) -> None:
    """It cannot replace its own host."""
    with host.lease() as model:
        pass
    with pytest.raises(TorchUtilsError, match="returned the model in use"):
        host.replace(lambda: model)
    assert (lent(host), model.closed) == (1, 0)
    with pytest.raises(TorchUtilsError, match="cannot replace model from its own load"):
        host.replace(lambda: host.replace(version(3)))
    assert host.replace(lambda: Version(lent(host) + 1))  # It may use the old model.
    assert lent(host) == 2


def test_model_in_a_process_is_replaced() -> None:
    with ModelHost(partial(hosted_models.Model, 1), isolation="process") as host:
        with host.lease() as old:
            assert host.replace(partial(hosted_models.Model, 2))
            with host.lease() as new:
                assert (old.arguments, new.arguments) == ((1,), (2,))
                assert old.pid() != new.pid()
        wait_for(lambda: host.status().unloads == 1)
        with pytest.raises(TypeError, match="another process"):
            host.replace(lambda: hosted_models.Model(3))


@pytest.mark.usefixtures("hasty")
@BOTH
def test_swaps_under_traffic_lose_no_request(overlap: bool) -> None:
    """No lease gets an older model than the one before, and unloads come in between."""
    swaps, done = 40, threading.Event()
    host = ModelHost(version(0), max_leases=3, keep_alive=0.001)

    def lend() -> None:
        last = 0
        while not done.is_set():
            with host.lease(timeout_s=WAIT_S) as model:
                assert last <= model.number
                last = model.check()
                with host.lease(timeout_s=WAIT_S) as inner:
                    assert last <= inner.check()

    async def call() -> None:
        last = 0
        while not done.is_set():
            number = await host.call(Version.check, timeout_s=WAIT_S)
            assert last <= number
            async with host.alease(timeout_s=WAIT_S) as model:
                last = model.check()
                assert number <= last

    def swap() -> None:
        try:
            for number in range(1, swaps + 1):
                host.replace(version(number), overlap=overlap, timeout_s=(None, WAIT_S)[number % 2])
                if number % 3 == 0:
                    assert not host.unload(timeout_s=WAIT_S).errors
        finally:
            done.set()

    # A nested lease needs a place of its own, so there are fewer threads than places.
    assert errors_in_threads(lend, lend, partial(run, call), partial(run, call), swap) == []
    assert lent(host) == swaps
    host.close()
    assert all(model.closed == 1 for model in Stub.made)


def array(size_mb: int, value: int = 0) -> Any:
    return np.full(size_mb * MB, value, np.uint8)


def first_of(pool: ModelPool, name: str) -> int:
    with pool.lease(name, WAIT_S) as model:
        return int(model[0])


@BOTH
def test_pool_counts_both_versions(overlap: bool) -> None:
    with ModelPool(budget_bytes=5 * MB, max_loaded=2) as pool:
        for name in "ab":
            pool.add(name, partial(array, 2, 1)).load()
        assert pool.replace("a", partial(array, 2, 2), overlap=overlap)
        states = [one.state for one in pool.status().values()]
        assert states == ["loaded", "unloaded" if overlap else "loaded"]
        with pytest.raises(NoRoomError, match="it needs 6"):
            pool.replace("a", partial(array, 6, 3), overlap=overlap)
        assert first_of(pool, "a") == 2
        with pool.lease("b"):
            if overlap:
                with pytest.raises(NoRoomError, match=r"a has .* pass overlap=False"):
                    pool.replace("a", partial(array, 2, 3), timeout_s=0.05)
            assert first_of(pool, "a") == 2
        assert asyncio.run(pool.areplace("a", partial(array, 2, 4), overlap=overlap))
        assert first_of(pool, "a") == 4


GIVEN_UP = """
import time, torch
from torch_utils import ModelHost

def load():
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        torch.ones(300, 300) @ torch.ones(300, 300)
    return torch.nn.Linear(2, 2)

with ModelHost(lambda: torch.nn.Linear(2, 2)) as host:
    host.load()
    try:
        host.replace(load, timeout_s=0.1)
    except TimeoutError:
        print("the old one stays")
"""


def test_exit_waits_for_a_load_that_was_given_up() -> None:
    """The thread of torch would end the process with an error."""
    pytest.importorskip("torch")
    result = run_forked(GIVEN_UP)
    assert_clean(result)
    assert result.stdout == "the old one stays\n"


ACTS: dict[str, Callable[[ModelPool], Any]] = {
    "unload": lambda pool: pool.unload("a"),
    "drain": lambda pool: pool.unload("a", timeout_s=0.001),
    "pool": lambda pool: pool.lease("b", timeout_s=0.001).__enter__(),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("act", ACTS)
def test_interrupts_leave_the_lock_and_the_garbage_collector(act: str) -> None:
    """At random moments, while the main thread waits for leases of others or for room."""
    done = threading.Event()
    pool = ModelPool(max_loaded=1)
    host = pool.add("a", version(1))
    pool.add("b", version(2))

    def lend() -> None:
        while not done.is_set():
            assert lent(host) == 1

    def interrupt(*_: object) -> None:
        raise Interrupt

    thread = threading.Thread(target=lend)
    thread.start()
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(200):
            with contextlib.suppress(Interrupt):
                end = time.monotonic() + 1  # An interrupt in a destructor is lost.
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
                while time.monotonic() < end:
                    with contextlib.suppress(ModelInUseError, NoRoomError, TimeoutError):
                        ACTS[act](pool)
            wait_for(gc.isenabled)  # The other thread may hold the lock just now.
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        done.set()
        thread.join()
    gc.collect()
    assert lent(host) == 1
    pool.close()
