"""Tests of ModelHost with models in this process."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, arg-type, assignment, func-returns-value, operator"
# mypy: disable-error-code="var-annotated"

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
import weakref
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.hosting_stub import Stub, run, threads_inside
from tests.support.programs import TIMEOUT_S
from tests.support.threads import errors_in_threads
from tests.support.waiting import wait_for, wait_for_async
from torch_utils import (
    CleanupReport,
    ModelHost,
    ModelInUseError,
    Resource,
    ResourceClosedError,
    TorchUtilsError,
)


class Holds:
    """An ordinary object that holds a part of its model."""

    def __init__(self, **parts: object) -> None:
        vars(self).update(parts)


# Loading


def test_concurrent_threads_load_the_model_once() -> None:
    """status() does not load it."""
    host = ModelHost(lambda: (wait_for(lambda: threads_inside("torch_utils") > 8), Stub())[1])
    assert (host.status().state, len(Stub.made)) == ("unloaded", 0)
    models = []

    def work() -> None:
        with host.lease() as model:
            models.append(model)

    assert errors_in_threads(*[work] * 64) == []
    assert len(set(map(id, models))) == 1
    status = host.status()
    assert (status.state, status.loads, status.leases) == ("loaded", 1, 0)
    host.close()
    assert [stub.closed for stub in Stub.made] == [1]


@pytest.mark.parametrize("kind", [OSError, StopIteration])
def test_failed_load_raises_in_all_waiters_and_next_lease_retries(kind: type[Exception]) -> None:
    tries, fails, half = [], True, []

    def load() -> Stub:
        tries.append(1)
        if fails:
            partly_loaded = Holds()
            half.append(weakref.ref(partly_loaded))
            if len(tries) == 1:
                wait_for(lambda: threads_inside("torch_utils") == 16)
            raise kind("no weights")
        return Stub()

    host = ModelHost(load)
    errors = errors_in_threads(*[lambda: host.lease().__enter__()] * 16)
    assert list(map(repr, errors)) == [f"{kind.__name__}('no weights')"] * 16
    assert len(tries) < 16  # Not each by itself.
    assert half[0]() is None  # The frames of the exception are cleared.
    status = host.status()
    assert (status.state, status.loads, status.last_error) == (
        "unloaded",
        0,
        f"{kind.__name__}('no weights')",
    )
    fails = False
    with host.lease() as model:
        assert model.use()
    assert host.status().last_error is None
    host.close()


class Owner(Holds, Resource):
    """A resource that holds a part of its model."""

    def _release(self) -> None: ...


def linear():
    return pytest.importorskip("torch").nn.Linear(1000, 1000, bias=False)


KINDS = {
    "module": linear,
    "tuple": lambda: (linear(), object()),
    "pipeline": lambda: Holds(pipe=SimpleNamespace(model=linear(), tokenizer=object())),
    "resource": lambda: Holds(model=Owner(model=linear())),
    "arrays": lambda: (lambda array: {"a": array, "view": array[5:]})(np.zeros(500_000)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_model_holds_counts_once(kind, caplog) -> None:
    with ModelHost(KINDS[kind]) as host:
        host.load()
        assert host.status().nbytes == 4_000_000
        host.unload()


@pytest.mark.parametrize("load", [linear, KINDS["tuple"], Owner])
def test_load_that_caches_or_returns_no_model_is_refused(load) -> None:
    with ModelHost(lru_cache(load), name="cached", nbytes=1) as host:
        host.load()
        host.unload()
        for _ in range(2):
            with pytest.raises(TorchUtilsError, match="do not cache it"), host.lease():
                pass
            assert host.status().state == "unloaded"
    with ModelHost(lambda: None) as host, pytest.raises(TypeError, match="returned None"):
        host.load()


def test_model_that_cannot_be_released_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """At each load and at each unload, whose report has the error."""
    with ModelHost(lambda: lambda text: text[::-1], name="reverse") as host:
        for _ in range(2):
            with host.lease() as model:
                assert model("ab") == "ba"
            assert "reverse was only dropped" in str(host.unload().errors[0])
    messages = [record.getMessage() for record in caplog.records]
    assert ["declare nbytes=" in text for text in messages] == [True, False, True, False]
    assert ["was only dropped" in text for text in messages] == [False, True, False, True]
    caplog.clear()
    with ModelHost(lambda: str.upper, nbytes=5) as host, host.lease():
        assert host.status().nbytes == 5
    with ModelHost(Stub) as host:
        host.load()
    assert [record.getMessage()[:9] for record in caplog.records] == ["test_mode"]  # The unload.


class Model:
    """Callable, as an nn.Module."""

    def forward(self, text: str) -> str:
        return text

    __call__ = forward


@pytest.mark.parametrize("what", [5, None, asyncio.sleep, Model()])
def test_init_refuses_wrong_arguments(what) -> None:
    with pytest.raises(TypeError, match="load must be a plain function"):
        ModelHost(what)
    with pytest.raises(ValueError, match="isolation must be"):
        ModelHost(Stub, isolation="fork")
    with pytest.raises(TypeError, match='isolation="thread"') as caught:
        ModelHost(lambda: 1, isolation="process")
    assert not hasattr(caught.value, "__notes__")  # Closing the half-made host does not fail.
    for options in ({"call_timeout_s": 1}, {"environment": {}}):
        with pytest.raises(ValueError, match='need isolation="process"'):
            ModelHost(Stub, **options)
    for options in ({"call_timeout_s": -1}, {"max_leases": 0}):
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            ModelHost(Stub, **{"isolation": "process", **options})


# Leases


def test_model_is_never_unloaded_while_it_is_leased() -> None:
    """Callers, an unloading thread and a short keep_alive compete."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    host = ModelHost(Stub, keep_alive="10ms")
    refused = []
    stop = threading.Event()

    def unload() -> None:
        while not stop.is_set():
            try:
                host.unload()
            except ModelInUseError:
                refused.append(1)

    def work(chance: random.Random) -> None:
        for _ in range(20):
            with host.lease() as model:
                for _ in range(20):
                    model.use()
                    time.sleep(0)
            time.sleep(chance.random() / 100)

    def was_refused_and_unloaded() -> bool:
        assert errors_in_threads(*[partial(work, random.Random(seed + n)) for n in range(6)]) == []
        return bool(refused) and host.status().loads > 1

    unloader = threading.Thread(target=unload)
    unloader.start()
    try:
        wait_for(was_refused_and_unloaded)
    finally:
        stop.set()
        unloader.join()
    host.close()
    status = host.status()
    assert status.loads == status.unloads == len(Stub.made)
    assert all(stub.closed == 1 for stub in Stub.made)


def test_unload_names_leases_and_reports_freed_bytes() -> None:
    host = ModelHost(Stub, name="stub")
    assert host.status().name == "stub"
    assert isinstance(host.unload(), CleanupReport)
    with host.lease():
        where = rf"{Path(__file__).name}:\d+ in test_unload_names"
        with pytest.raises(ModelInUseError, match=where):
            host.unload()
        assert host.status().leases == 1
    assert host.load() is False
    host.unload()
    assert host.load() is True
    host.close()


def test_further_leases_wait_for_the_end_of_one() -> None:
    """Those of threads and of coroutines, at most for their timeout_s."""
    together, most = [], []

    def work(model: Stub) -> int:
        together.append(1)
        most.append(len(together))
        time.sleep(0.001)
        together.pop()
        return model.use()

    def lend() -> None:
        with host.lease(timeout_s=60) as model:
            work(model)

    async def coroutines() -> None:
        assert await asyncio.gather(*[host.call(work, timeout_s=60) for _ in range(8)]) == [1] * 8
        with host.lease(), host.lease():
            with pytest.raises(TimeoutError, match=r"still leased after 0\.01 s"):
                await host.alease(timeout_s=0.01).__aenter__()

    with ModelHost(Stub, max_leases=2) as host:
        assert errors_in_threads(*[lend] * 8) == []
        run(coroutines)
        assert max(most) == 2
        assert host.status().leases == 0


def test_call_of_a_function_that_raises_stop_iteration_ends() -> None:
    """A coroutine cannot raise it."""

    async def main() -> None:
        with ModelHost(Stub) as host, pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(host.call(lambda model: next(iter(()))), TIMEOUT_S)

    run(main)


def test_cancelled_call_keeps_the_model_until_its_function_returns() -> None:
    begun, go_on = threading.Event(), threading.Event()
    used: list[int] = []

    def work(model: Stub) -> None:
        begun.set()
        go_on.wait()
        used.append(model.use())

    async def main() -> None:
        host = ModelHost(Stub, keep_alive=0)
        task = asyncio.create_task(host.call(work))
        await wait_for_async(begun.is_set)
        task.cancel()
        await asyncio.wait([task])
        with pytest.raises(ModelInUseError, match="in main"):
            host.unload()
        go_on.set()
        await wait_for_async(lambda: host.status().state == "unloaded")
        with pytest.raises(ZeroDivisionError):
            await host.call(lambda model: 1 / 0)
        await host.aclose()

    run(main)
    assert used == [1]


def test_call_that_is_cancelled_before_it_began_keeps_no_thread() -> None:
    """Nor does it call the function or load the model later."""
    called: list[Stub] = []

    def workers() -> int:
        return sum(thread.name == "torch_utils-host" for thread in threading.enumerate())

    async def main() -> None:
        host = ModelHost(Stub, max_leases=1)
        async with host.alease():
            before = workers()
            tasks = [asyncio.create_task(host.call(called.append)) for _ in range(5)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert workers() <= before
        host.unload()
        await asyncio.sleep(0.05)
        assert (host.status().loads, host.status().leases, called) == (1, 0, [])
        await host.aclose()

    run(main)


def test_garbage_collected_lease_ends() -> None:
    """Also if another thread collects it."""
    host = ModelHost(Stub, keep_alive=0)
    lease = host.lease()
    lease.__enter__()
    with pytest.raises(TorchUtilsError, match="entered once"):
        lease.__enter__()
    del lease
    wait_for(lambda: host.status().state == "unloaded")
    host.close()


# How long an idle model is kept


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0.5, 0.5), ("90s", 90), ("1h", 3600), ("1.5m", 90), ("250ms", 0.25), (-1, None),
    ],
)  # fmt: skip
def test_keep_alive_counts_from_end_of_last_lease(value, seconds) -> None:
    with ModelHost(Stub, keep_alive=value) as host:
        with host.lease() as outer:
            with host.lease() as inner:
                assert inner is outer
            status = host.status()
            assert (status.leases, status.idle_s, status.expires_in_s) == (1, None, None)
            ends = time.monotonic()
        status = host.status()
        if seconds is None:
            assert status.expires_in_s is None
        elif status.state == "loaded" and status.expires_in_s:
            assert 0 <= status.idle_s <= time.monotonic() - ends
            assert status.idle_s + status.expires_in_s == pytest.approx(seconds)
        else:  # On a machine that stood still.
            assert time.monotonic() - ends > seconds


@pytest.mark.parametrize("value", [0, "0"])
def test_keep_alive_of_zero_unloads_after_block(value) -> None:
    """A model that was loaded beforehand is kept."""
    with ModelHost(Stub, keep_alive=value) as host:
        with host.lease() as outer, host.lease() as inner:
            assert outer is inner
        wait_for(lambda: host.status().state == "unloaded")  # Its expiry thread may be at it.
        host.load()
        assert (host.status().state, host.status().expires_in_s) == ("loaded", None)


@pytest.mark.parametrize("value", ["", "10", "1h30m", "-5m", -2, float("nan"), None, True, b"5m"])
def test_wrong_keep_alive_error_lists_valid_forms(value) -> None:
    with pytest.raises((TypeError, ValueError), match="90s") as caught:
        ModelHost(int, keep_alive=value)
    assert repr(value) in str(caught.value)


def test_idle_model_expires_and_next_lease_loads_it() -> None:
    """No thread remains."""
    before = set(threading.enumerate())
    host = ModelHost(Stub, keep_alive=0.02)
    for count in (1, 2):
        with host.lease() as model:
            time.sleep(0.05)
            assert model.use()
        wait_for(lambda: host.status().state == "unloaded")
        assert host.status().unloads == count
    wait_for(lambda: set(threading.enumerate()) <= before)
    host.close()


# Closing


def test_close_waits_for_leases_and_refuses_new_ones() -> None:
    host = ModelHost(Stub)
    lent, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with host.lease() as model:
            lent.set()
            go_on.wait()
            model.use()

    def is_refused() -> bool:
        try:
            with host.lease():
                return False
        except ResourceClosedError:
            return True

    worker = threading.Thread(target=work)
    worker.start()
    lent.wait()
    closer = threading.Thread(target=host.close, args=(TIMEOUT_S,))
    closer.start()
    wait_for(is_refused)
    go_on.set()
    closer.join()
    worker.join()
    assert host.status().state == "closed"
    assert Stub.made[0].closed == 1


def test_close_names_open_leases_at_the_deadline() -> None:
    """It does not wait for a lease of the closing thread."""
    host = ModelHost(Stub)
    with host.lease() as model:
        with pytest.raises(ModelInUseError, match="in test_close_names"):
            host.close()
        assert model.use()
        with pytest.raises(ResourceClosedError):
            host.lease().__enter__()
    wait_for(lambda: host.status().state == "closed")
    assert model.closed == 1


# Coroutines


def test_coroutines_load_once_without_blocking_the_loop() -> None:
    turns = []
    go_on = threading.Event()

    def load() -> Stub:
        assert threading.current_thread() is not threading.main_thread()
        go_on.wait()
        return Stub()

    async def main() -> None:
        host = ModelHost(load)

        async def work() -> object:
            async with host.alease() as model:
                return model

        tasks = [asyncio.create_task(work()) for _ in range(64)]
        while len(turns) < 100:
            await asyncio.sleep(0)
            turns.append(host.status().state)
        assert turns[-1] == "loading"
        go_on.set()
        assert len(set(await asyncio.gather(*tasks))) == 1
        assert host.status().leases == 0
        await host.aclose()
        assert host.closed

    run(main)
    assert len(Stub.made) == 1


def test_cancelled_coroutine_keeps_no_lease() -> None:
    """At each step; the load continues for the next caller."""

    async def main() -> None:
        host = ModelHost(lambda: (time.sleep(0.01), Stub())[1], keep_alive=-1)
        for steps in range(12):

            async def work() -> None:
                async with host.alease():
                    await asyncio.sleep(600)

            task = asyncio.create_task(work())
            for _ in range(steps):
                await asyncio.sleep(0.002)
            task.cancel()
            await asyncio.wait([task])
            assert host.status().leases == 0
        async with host.alease(timeout_s=60) as model:
            assert model.use()
        await host.aclose()

    run(main)


def test_alease_raises_load_errors_and_timeouts() -> None:
    go_on = threading.Event()

    async def main() -> None:
        for load, error in (
            (lambda: 1 / 0, ZeroDivisionError),
            (lambda: go_on.wait() and Stub(), TimeoutError),
            (partial(sys.exit, 3), TorchUtilsError),
        ):
            go_on.clear()
            host = ModelHost(load)
            with pytest.raises(error):
                await host.alease(timeout_s=60 if error is not TimeoutError else 0.01).__aenter__()
            assert host.status().leases == 0
            go_on.set()
            await host.aclose()

    run(main)


def test_aclose_waits_without_blocking_the_loop() -> None:
    async def main() -> None:
        host = ModelHost(Stub, keep_alive=0)
        entered = asyncio.Event()

        async def work() -> None:
            async with host.alease() as model:
                entered.set()
                while not host.closed:
                    await asyncio.sleep(0)
                model.use()

        async with host:
            task = asyncio.create_task(work())
            await entered.wait()
        await task
        assert host.status().state == "closed"

    run(main)
