"""Tests of new versions of a model: `ModelHost.replace`, and unloads that wait for leases."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, arg-type"

import asyncio
import contextlib
import gc
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.support import hosted_models
from tests.support.hosting_stub import Stub, run
from tests.support.interrupts import Interrupt
from tests.support.programs import output_of
from tests.support.threads import errors_in_threads, in_threads
from tests.support.waiting import wait_for, wait_for_async
from torch_utils import (
    ModelHost,
    ModelInUseError,
    ModelPool,
    NoRoomError,
    ResourceClosedError,
    TorchUtilsError,
    release,
)

BOTH = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one_at_a_time"])
WAIT_S = 60.0


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
        assert host.replace(version(2))
        assert (lent(host), old.check(), host.status().leases) == (2, 1, 1)
        assert host.replace(version(3), timeout_s=WAIT_S)
        assert (lent(host), old.check(), open_models()) == (3, 1, [1, 3])
    wait_for(lambda: host.status().unloads == 2)
    assert open_models() == [3]
    status = host.status()
    assert (status.state, status.loads, status.unloads) == ("loaded", 3, 2)
    host.unload()
    assert lent(host) == 3  # The next load is the new one, too.


def test_model_can_be_replaced_from_coroutines() -> None:
    async def main() -> None:
        async with ModelHost(version(1)) as host, host.alease() as old:
            assert await host.areplace(version(2), timeout_s=WAIT_S)
            assert (await host.call(Version.check), old.check()) == (2, 1)
            with pytest.raises(ModelInUseError, match="in main, by a coroutine"):
                await host.areplace(version(3), overlap=False)  # It would wait for this lease.
            assert await host.areplace(version(3))
            assert await host.call(Version.check) == 3

    run(main)
    assert open_models() == []


def test_without_overlap_only_one_model_is_in_memory(host: ModelHost[Any]) -> None:
    """Open leases end first, and new ones wait for the new model."""
    most: list[int] = []

    def load() -> Version:
        most.append(len(open_models()))
        return Version(2)

    with host.lease() as old:
        with pytest.raises(ModelInUseError, match="in test_without_overlap"):
            host.replace(load, overlap=False)
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
    with pytest.raises((TypeError, ValueError), match="timeout_s must"):
        host.replace(version(2), timeout_s=-1)
    assert lent(host) == 1


@BOTH
def test_old_model_stays_at_the_deadline(host: ModelHost[Any], overlap: bool) -> None:
    """What the load returns later is dropped. So it is if the caller is cancelled."""
    go_on = threading.Event()

    def load() -> Version:
        go_on.wait()
        return Version(2)

    async def cancel() -> None:
        task = asyncio.create_task(host.areplace(load, overlap=overlap))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])

    with pytest.raises(TimeoutError, match=r"model was not replaced within 0\.05 s"):
        host.replace(load, overlap=overlap, timeout_s=0.05)
    assert lent(host) == 1
    asyncio.run(cancel())
    assert lent(host) == 1
    go_on.set()
    wait_for(lambda: [one.closed for one in Stub.made if one.number == 2] == [1, 1])
    assert lent(host) == 1
    assert host.replace(version(3), overlap=overlap)
    assert (lent(host), open_models()) == (3, [3])


def test_deadline_counts_for_leases_too(host: ModelHost[Any]) -> None:
    with host.lease() as model:
        errors = errors_in_threads(
            partial(host.replace, version(2), overlap=False, timeout_s=0.05),
            partial(host.unload, timeout_s=0.05),
        )
        assert {type(error) for error in errors} == {TimeoutError, ModelInUseError}
        assert "model has 1 open lease" in str(errors[1])
        with pytest.raises(ModelInUseError):
            host.unload(timeout_s=WAIT_S)  # It would wait for its own lease.
        assert model.check() == 1
    assert lent(host) == 1


def test_model_that_is_not_loaded_is_not_loaded() -> None:
    """Nor one that the program has released, nor one that loads at that moment."""
    torch = pytest.importorskip("torch")
    with ModelHost(version(1)) as host:
        assert not host.replace(version(2))
        assert Stub.made == []
        assert lent(host) == 2
    with ModelHost(lambda: torch.nn.Linear(2, 2)) as host:
        with host.lease() as model:
            release(model)
        assert not host.replace(lambda: torch.nn.Linear(3, 3))
        with host.lease() as model:
            assert model.in_features == 3
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


@BOTH
def test_idle_model_may_go_while_its_replacement_loads(overlap: bool) -> None:
    with ModelHost(version(1), keep_alive=0) as host:
        host.load()

        def load() -> Version:
            if overlap:
                assert lent(host) == 1
                wait_for(lambda: host.status().state == "unloaded")
            return Version(2)

        assert host.replace(load, overlap=overlap)
        assert lent(host) == 2
        wait_for(lambda: open_models() == [])


@BOTH
def test_close_waits_for_a_replacement(overlap: bool) -> None:
    host = ModelHost(version(1))
    host.load()
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


def test_load_function_cannot_replace_its_own_host(host: ModelHost[Any]) -> None:
    with pytest.raises(TorchUtilsError, match="cannot replace model from its own load"):
        host.replace(lambda: host.replace(version(3)))
    assert lent(host) == 1
    assert host.replace(lambda: Version(lent(host) + 1))  # It may use the old model.
    assert lent(host) == 2


def test_model_in_a_process_is_replaced() -> None:
    with ModelHost(partial(hosted_models.Model, 1), isolation="process", name="model") as host:
        with host.lease() as old:
            first = old.pid()
            assert host.replace(partial(hosted_models.Model, 2))
            with host.lease() as new:
                assert new.arguments == (2,)
                assert new.pid() != first == old.pid()
        wait_for(lambda: host.status().unloads == 1)
        with pytest.raises(TypeError, match="another process"):
            host.replace(lambda: hosted_models.Model(3))
        assert host.replace(partial(hosted_models.Model, 4), overlap=False)
        with host.lease() as model:
            assert model.arguments == (4,)


@pytest.mark.parametrize("switch_s", [0.005, 1e-6])
@BOTH
def test_swaps_under_traffic_lose_no_request(overlap: bool, switch_s: float) -> None:
    """No lease gets an older model than the one before, and unloads come in between."""
    swaps, done = 60, threading.Event()
    host = ModelHost(version(0), max_leases=3, keep_alive=0.001)

    def lend() -> int:
        last = count = 0
        while not done.is_set():
            with host.lease(timeout_s=WAIT_S) as model:
                assert last <= model.number
                last, count = model.check(), count + 1
                with host.lease(timeout_s=WAIT_S) as inner:
                    assert last <= inner.check()
        return count

    async def call() -> None:
        async def client() -> None:
            last = 0
            while not done.is_set():
                number = await host.call(Version.check, timeout_s=WAIT_S)
                assert last <= number
                async with host.alease(timeout_s=WAIT_S) as model:
                    last = model.check()
                    assert number <= last

        await asyncio.gather(*(client() for _ in range(4)))

    def swap() -> None:
        try:
            for number in range(1, swaps + 1):
                host.replace(version(number), overlap=overlap, timeout_s=(None, WAIT_S)[number % 2])
                if number % 5 == 0:
                    host.unload(timeout_s=WAIT_S)
        finally:
            done.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(switch_s)
    try:
        # A nested lease needs a place of its own, so there are fewer threads than places.
        assert errors_in_threads(lend, lend, partial(run, call), swap) == []
    finally:
        sys.setswitchinterval(before)
    assert lent(host) == swaps
    host.close()
    assert all(model.closed == 1 for model in Stub.made)


def test_unload_waits_for_leases_and_new_ones_load_again() -> None:
    """Under traffic that never pauses by itself."""
    host, done = ModelHost(Stub), threading.Event()

    def lend() -> None:
        while not done.is_set():
            with host.lease(timeout_s=WAIT_S) as model:
                model.use()
                time.sleep(0.001)

    def unload() -> None:
        for _ in range(20):
            host.load()
            assert not host.unload(timeout_s=WAIT_S).errors
        done.set()

    assert errors_in_threads(*[lend] * 6, unload) == []
    host.close()
    assert len(Stub.made) >= 20


def test_pool_counts_both_versions() -> None:
    torch = pytest.importorskip("torch")

    def load(value: int) -> Any:
        return torch.full((1 << 20,), value, dtype=torch.uint8)

    async def main() -> None:
        assert await pool.areplace("a", partial(load, 4))

    with ModelPool(budget_bytes=5 << 19, max_loaded=2) as pool:
        for name in "ab":
            pool.add(name, partial(load, 1)).load()
        assert pool.replace("a", partial(load, 2))  # b is evicted.
        assert [one.state for one in pool.status().values()] == ["loaded", "unloaded"]
        with pool.lease("b") as b, pool.lease("a") as a:
            assert (int(a[0]), int(b[0])) == (2, 1)
            with pytest.raises(NoRoomError, match="overlap=False"):
                pool.replace("a", partial(load, 3), timeout_s=0.05)
            assert int(a[0]) == 2
        assert pool.replace("a", partial(load, 3), overlap=False)
        asyncio.run(main())
        with pool.lease("a") as a:
            assert int(a[0]) == 4
    with ModelPool(max_loaded=1) as pool:
        pool.add("a", partial(load, 1)).load()
        with pytest.raises(NoRoomError, match=r"a has .* pass overlap=False"):
            pool.replace("a", partial(load, 2))
        assert pool.replace("a", partial(load, 2), overlap=False)
        with pool.lease("a") as a:
            assert int(a[0]) == 2


def test_alease_waits_while_a_model_is_replaced_without_overlap() -> None:
    async def main() -> None:
        async with ModelHost(version(1)) as host:
            async with host.alease() as old:
                swap = asyncio.create_task(
                    asyncio.to_thread(partial(host.replace, version(2), overlap=False))
                )
                await asyncio.sleep(0.05)
                waiting = asyncio.create_task(host.call(Version.check, timeout_s=WAIT_S))
                async with host.alease(timeout_s=WAIT_S) as inner:  # of the same task
                    assert inner is old
                await wait_for_async(lambda: not waiting.done() and not swap.done())
            assert await swap
            assert await waiting == 2

    run(main)


def test_load_that_returns_the_model_in_use_is_refused(host: ModelHost[Any]) -> None:
    with host.lease() as model:
        pass
    with pytest.raises(TorchUtilsError, match="returned the model in use"):
        host.replace(lambda: model)
    assert (lent(host), model.closed) == (1, 0)


def test_refused_replacement_leaves_the_size_of_the_old_model() -> None:
    """With and without overlap; and a function that is exchanged has no known size."""
    np = pytest.importorskip("numpy")

    def load(size_mb: int) -> Any:
        return {"array": np.ones(size_mb << 20, np.uint8)}

    with ModelPool(budget_bytes=15 << 20) as pool:
        host = pool.add("a", partial(load, 5))
        for overlap in (True, False):
            host.load()
            with pytest.raises(NoRoomError, match="it needs 21"):
                host.replace(partial(load, 20), overlap=overlap)
            with host.lease(timeout_s=WAIT_S) as model:
                assert len(model["array"]) == 5 << 20
            del model  # Otherwise it counts.
            host.unload()
        assert not host.replace(partial(load, 4))
        pool.add("b", partial(load, 10))
        with host.lease(timeout_s=WAIT_S), pool.lease("b", WAIT_S):
            assert host.status().nbytes == 4 << 20


def test_replacement_that_was_given_up_counts_until_its_load_ends() -> None:
    go_on = threading.Event()

    def load() -> Version:
        go_on.wait()
        return Version(2)

    with ModelPool(max_loaded=2) as pool:
        for name in "ab":
            pool.add(name, version(1))
        pool.replace("a", version(1))
        with pool.lease("a"):
            with pytest.raises(TimeoutError):
                pool.replace("a", load, timeout_s=0.05)
            with pytest.raises(NoRoomError):
                pool.lease("b", 0.05).__enter__()
            go_on.set()
            with pool.lease("b", WAIT_S) as model:
                assert model.check() == 1
        wait_for(lambda: open_models() == [1, 1])


def test_function_that_was_given_up_is_forgotten_after_its_load(host: ModelHost[Any]) -> None:
    go_on = threading.Event()

    class Loader:
        def __call__(self) -> Version:
            go_on.wait()
            return Version(2)

    loader = Loader()
    alive = weakref.ref(loader)
    with pytest.raises(TimeoutError):
        host.replace(loader, timeout_s=0.05)
    del loader
    go_on.set()
    wait_for(lambda: Stub.made[-1].closed)
    wait_for(lambda: gc.collect() is not None and alive() is None)
    assert lent(host) == 1


def test_waiting_lease_of_a_closed_loop_does_not_take_the_model(host: ModelHost[Any]) -> None:
    """A coroutine that nobody can resume ends when it is collected."""

    async def wait() -> None:
        async with limited.alease():
            pass

    with ModelHost(version(1), max_leases=1) as limited:
        with limited.lease():
            loop = asyncio.new_event_loop()
            task = loop.create_task(wait())
            task._log_destroy_pending = False  # noqa: SLF001  (of asyncio)
            loop.run_until_complete(asyncio.sleep(0.01))
            loop.close()
            del task, loop
            gc.collect()
        with limited.lease(timeout_s=WAIT_S) as model:
            assert model.check() == 1


GIVEN_UP = """
import time

import torch

from torch_utils import ModelHost


def load():
    end = time.monotonic() + 1
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
    assert output_of(GIVEN_UP) == "the old one stays\n"


@pytest.mark.slow
@pytest.mark.parametrize("act", ["unload", "drain", "pool"])
def test_interrupts_leave_the_lock_and_the_garbage_collector(act: str) -> None:
    """At random moments, while the main thread waits for leases of others or for room."""
    done = threading.Event()
    pool = ModelPool(max_loaded=1)
    host = pool.add("a", version(1))
    other = pool.add("b", version(2))
    acts: dict[str, Callable[[], Any]] = {
        "unload": host.unload,
        "drain": lambda: host.unload(timeout_s=0.001),
        "pool": lambda: other.lease(timeout_s=0.001).__enter__(),
    }

    def lend() -> None:
        while not done.is_set():
            with host.lease(timeout_s=WAIT_S) as model:
                model.check()

    def interrupt(*_: object) -> None:
        raise Interrupt

    thread = threading.Thread(target=lend)
    thread.start()
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
                while True:
                    with contextlib.suppress(ModelInUseError, NoRoomError, TimeoutError):
                        acts[act]()
            except Interrupt:
                pass
            wait_for(gc.isenabled)  # The other thread may hold the lock just now.
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        done.set()
        thread.join()
    gc.collect()
    with host.lease(timeout_s=WAIT_S) as model:
        assert model.check() == 1
    pool.close()
