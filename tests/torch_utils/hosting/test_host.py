"""Tests of ModelHost with models in this process: loads, leases, calls and ends."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, arg-type, assignment, func-returns-value, operator"
# mypy: disable-error-code="var-annotated"

import asyncio
import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from platform import libc_ver
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.clean_exit import check
from tests.support.hosting_stub import Stub, run, threads_inside
from tests.support.interrupts import Interrupt, Place, interrupt_everywhere, send_sigint
from tests.support.programs import IMPORT_PATH, output_of
from tests.support.threads import errors_in_threads
from tests.support.waiting import wait_for, wait_for_async
from torch_utils import (
    ModelHost,
    ModelInUseError,
    ModelPool,
    Resource,
    ResourceClosedError,
    TorchUtilsError,
    release,
)

# Loading


def lend(host: ModelHost[Stub]) -> None:
    with host.lease() as model:
        model.use()


def test_threads_and_coroutines_share_one_load() -> None:
    """The loop goes on meanwhile. status() does not load."""
    go_on = threading.Event()
    host = ModelHost(lambda: (go_on.wait(), Stub())[1])
    assert (host.status().state, len(Stub.made)) == ("unloaded", 0)

    async def main() -> None:
        calls = asyncio.gather(*[host.call(Stub.use) for _ in range(32)])
        await wait_for_async(lambda: threads_inside("torch_utils") >= 16)
        assert host.status().state == "loading"
        go_on.set()
        assert await calls == [1] * 32

    assert errors_in_threads(*[partial(lend, host)] * 16, partial(run, main)) == []
    status = host.status()
    assert (status.state, status.loads, status.leases) == ("loaded", 1, 0)
    host.close()
    assert [stub.closed for stub in Stub.made] == [1]


def test_failed_load_raises_in_all_waiters_and_next_lease_retries() -> None:
    tries, fails, half = [], True, []

    def load() -> Stub:
        tries.append(1)
        if fails:
            partly_loaded = np.zeros(3)
            half.append(weakref.ref(partly_loaded))
            if len(tries) == 1:
                wait_for(lambda: threads_inside("torch_utils") == 16)
            raise OSError("no weights")
        return Stub()

    host = ModelHost(load)
    errors = errors_in_threads(*[lambda: host.lease().__enter__()] * 16)
    assert list(map(repr, errors)) == ["OSError('no weights')"] * 16
    assert len(tries) < 16  # Not each by itself.
    assert half[0]() is None  # The frames of the exception are cleared.
    assert (host.status().loads, host.status().last_error) == (0, "OSError('no weights')")
    fails = False
    with host.lease() as model:
        assert model.use() and host.status().last_error is None
    host.close()


class Holder:
    """An ordinary object that holds a part of its model."""

    def __init__(self, model: object = None) -> None:
        self.model = model


class Owner(Holder, Resource):
    def _release(self) -> None: ...


def linear():
    return pytest.importorskip("torch").nn.Linear(1000, 1000, bias=False)


KINDS = {
    "module": linear,
    "tuple": lambda: (linear(), object()),
    "pipeline": lambda: Holder(SimpleNamespace(model=linear(), tokenizer=object())),
    "resource": lambda: Holder(Owner(linear())),
    "arrays": lambda: (lambda array: {"a": array, "view": array[5:]})(np.zeros(500_000)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_a_model_holds_counts_once(kind) -> None:
    with ModelHost(KINDS[kind]) as host:
        host.load()
        assert host.status().nbytes == 4_000_000


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


def test_model_that_the_program_released_is_loaded_again() -> None:
    with ModelHost(KINDS["resource"], keep_alive=-1) as host:
        with host.lease() as model:
            release(model)
            assert host.status().state == "unloaded"
        with host.lease() as model:
            assert vars(model.model)
        assert (host.status().loads, host.status().unloads) == (2, 1)


def test_model_that_cannot_be_released_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """At each load and at each unload, whose report has the error."""
    with ModelHost(lambda: str.upper, name="upper") as host:
        for _ in range(2):
            host.load()
            assert "upper was only dropped" in str(host.unload().errors[0])
    messages = [record.getMessage() for record in caplog.records]
    assert ["declare nbytes=" in text for text in messages] == [True, False, True, False]
    assert ["was only dropped" in text for text in messages] == [False, True, False, True]
    caplog.clear()
    with ModelHost(lambda: str.upper, nbytes=5) as declared, ModelHost(Stub) as closable:
        assert declared.load() and closable.load() and declared.status().nbytes == 5
    (record,) = caplog.records
    assert "was only dropped" in record.getMessage()


class Model:
    """Callable, as an nn.Module."""

    forward = __call__ = len


stub = partial(ModelHost, Stub)
WRONG_TYPES = [
    *[(ModelHost, {"load": load}, "plain function") for load in (5, asyncio.sleep, Model())],
    *[(stub, {"keep_alive": value}, f"{value!r}.*90s") for value in (None, True)],
    (ModelHost, {"load": lambda: 1, "isolation": "process"}, 'isolation="thread"'),
    (stub, {"nbytes": "5"}, "nbytes"),
    (ModelPool, {"budget_bytes": "4G"}, r"whole number, such as 4 << 30, got '4G'"),
]
WRONG_VALUES = [
    *[(stub, {"keep_alive": wrong}, f"{wrong!r}.*90s") for wrong in ("", "10", "1h30m", "-5m", -2)],
    (stub, {"keep_alive": float("nan")}, "nan.*90s"),
    (stub, {"isolation": "fork"}, "isolation must be"),
    (stub, {"idle": "nap"}, "idle must be"),
    (stub, {"call_timeout_s": 1}, 'need isolation="process"'),
    (stub, {"environment": {}}, 'need isolation="process"'),
    (stub, {"nbytes": {"gpu": 5}}, "nbytes"),
    (stub, {"max_leases": 0}, "max_leases"),
    (stub, {"isolation": "process", "call_timeout_s": -1}, "call_timeout_s"),
    (ModelPool, {"budget_bytes": 0}, "budget_bytes must be positive"),
    (ModelPool, {"budget_bytes": {"host": -1}}, "host"),
    (ModelPool, {"budget_bytes": {"cuda": 1}}, "cuda:0"),
    (ModelPool, {"budget_bytes": {}}, "budget_bytes"),
    (ModelPool, {"sleep_bytes": -1}, "sleep_bytes"),
    (ModelPool, {"keep_alive": "soon"}, "keep_alive"),
]


@pytest.mark.parametrize(
    ("error", "make", "options", "message"),
    [(TypeError, *row) for row in WRONG_TYPES] + [(ValueError, *row) for row in WRONG_VALUES],
)
def test_wrong_arguments_are_refused(error, make, options, message) -> None:
    with pytest.raises(error, match=message) as caught:
        make(**options)
    assert not hasattr(caught.value, "__notes__")  # Closing what was half made does not fail.


# Leases


@pytest.mark.usefixtures("hasty")
def test_model_is_never_unloaded_while_it_is_leased() -> None:
    """Callers, an unloading thread and a short keep_alive compete. status() never fails."""
    host = ModelHost(Stub, keep_alive="10ms", nbytes=24)
    refused = []

    def is_enough() -> bool:
        return len(refused) > 20 and host.status().loads > 20

    def work() -> None:
        while not is_enough():
            with host.lease() as model:
                for _ in range(20):
                    model.use()
                    time.sleep(0)
            time.sleep(random.random() / 10)

    def unload() -> None:
        while not is_enough():
            time.sleep(random.random() / 500)
            try:
                host.unload()
            except ModelInUseError:
                refused.append(1)

    def ask() -> None:
        while not is_enough():
            status = host.status()
            assert status.nbytes in (0, 24)
            assert status.state in ("unloaded", "loading", "loaded", "unloading")
            time.sleep(0.001)

    assert errors_in_threads(*[work] * 6, unload, ask) == []
    host.close()
    assert host.status().loads == host.status().unloads == len(Stub.made)
    assert all(stub.closed == 1 for stub in Stub.made)


def test_further_leases_wait_for_the_end_of_one() -> None:
    """Those of threads and of coroutines, at most for their timeout_s."""
    together, most = [], []

    def work(model: Stub) -> None:
        together.append(model.use())
        most.append(len(together))
        time.sleep(0.001)
        together.pop()

    def lend() -> None:
        with host.lease(timeout_s=60) as model:
            work(model)

    with ModelHost(Stub, max_leases=2) as host:
        call = partial(run, partial(host.call, work, timeout_s=60))
        assert errors_in_threads(*[lend, call] * 8) == []
        assert (max(most), len(most), host.status().leases) == (2, 16, 0)
        with host.lease(), host.lease():
            with pytest.raises(TimeoutError, match=r"still leased after 0\.01 s"):
                host.lease(timeout_s=0.01).__enter__()
            with pytest.raises(TimeoutError, match=r"still leased after 0\.01 s"):
                asyncio.run(host.call(work, timeout_s=0.01))


def test_leases_are_lent_in_the_order_of_their_requests() -> None:
    """Those of threads and of coroutines, also after the load for which all of them wait."""
    go_on, order = threading.Event(), list[int]()

    def lend(number: int) -> None:
        with host.lease(timeout_s=60):
            order.append(number)

    async def alend(number: int) -> None:
        async with host.alease(timeout_s=60):
            order.append(number)

    def begin(ask: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=ask, args=arguments)
        thread.start()
        time.sleep(0.05)
        return thread

    with ModelHost(lambda: (go_on.wait(), Stub())[1], max_leases=1) as host:
        threads = []
        for number in range(0, 6, 2):
            threads.append(begin(lend, number))
            threads.append(begin(run, partial(alend, number + 1)))
        go_on.set()
        for thread in threads:
            thread.join()
        with host.lease():
            waiting = begin(lend, 6)
        lend(7)  # It must not overtake.
        waiting.join()
    assert order == list(range(8))


def test_context_variables_reach_calls_and_loads() -> None:
    """As with asyncio.to_thread; each caller has its own."""
    request: ContextVar[str] = ContextVar("request", default="-")
    seen = []

    def load() -> Stub:
        seen.append(request.get())
        return Stub()

    async def main() -> None:
        async def ask(name: str) -> str:
            request.set(name)
            return await host.call(lambda model: (time.sleep(0.01), request.get())[1])

        request.set("the first")
        async with ModelHost(load) as host:
            await host.call(Stub.use)
            names = [f"request {n}" for n in range(8)]
            assert await asyncio.gather(*map(ask, names)) == names
            request.set("the second")
            await host.areplace(load)

    run(main)
    assert seen == ["the first", "the second"]


class AsyncLoader:
    async def __call__(self) -> Stub:
        return Stub()


def test_functions_that_have_to_be_awaited_are_refused() -> None:
    """Nothing lends a coroutine, and a generator would use the model after its lease."""

    async def use(model: Stub) -> int:
        return model.use()

    def stream(model: Stub) -> Iterator[int]:
        yield model.use()

    async def main() -> None:
        async with ModelHost(Stub) as host:
            for function, message in (
                (use, "async with"),
                (lambda model: use(model), r"use\(\) has to be awaited or"),
                (stream, r"stream\(\) has to be awaited or"),
            ):
                with pytest.raises(TypeError, match=message):
                    await host.call(function)
            assert await host.call(Stub.use) == 1

    run(main)
    for load in (AsyncLoader(), partial(AsyncLoader().__call__)):
        with pytest.raises(TypeError, match="plain function"):
            ModelHost(load)
    with ModelHost(lambda: AsyncLoader()()) as host, pytest.raises(TypeError, match="a plain func"):
        host.load()


def test_cancelled_call_keeps_the_model_until_its_function_returns() -> None:
    begun, go_on = threading.Event(), threading.Event()
    used: list[int] = []

    def work(model: Stub) -> None:
        begun.set()
        go_on.wait()
        used.append(model.use())

    async def main() -> None:
        async with ModelHost(Stub, keep_alive=0) as host:
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

    run(main)
    assert used == [1]


def test_garbage_collected_lease_ends() -> None:
    with ModelHost(Stub, keep_alive=0) as host:
        lease = host.lease()
        lease.__enter__()
        with pytest.raises(TorchUtilsError, match="entered once"):
            lease.__enter__()
        del lease
        wait_for(lambda: host.status().state == "unloaded")


# How long an idle model is kept


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(90.5, 90.5), ("90s", 90), ("1h", 3600), ("1.5m", 90), ("90000ms", 90), (-1, None)],
)
def test_keep_alive_counts_from_end_of_last_lease(value, seconds) -> None:
    with ModelHost(Stub, keep_alive=value) as host:
        with host.lease() as outer:
            with host.lease() as inner:
                assert inner is outer
            status = host.status()
            assert (status.leases, status.idle_s, status.expires_in_s) == (1, None, None)
        status = host.status()
        left_s = None if seconds is None else pytest.approx(seconds - status.idle_s)
        assert status.expires_in_s == left_s


@pytest.mark.parametrize("value", [0.02, "0"])
def test_idle_model_is_unloaded_and_next_lease_loads_it(value) -> None:
    """No thread remains. A keep_alive of 0 keeps a model that was loaded beforehand."""
    before = set(threading.enumerate())
    with ModelHost(Stub, keep_alive=value) as host:
        for count in (1, 2):
            with host.lease() as outer, host.lease() as inner:
                time.sleep(0.05)
                assert outer is inner and outer.use()
            wait_for(lambda: host.status().state == "unloaded")
            assert host.status().unloads == count
        wait_for(lambda: set(threading.enumerate()) <= before)
        host.load()
        assert value == 0.02 or host.status().expires_in_s is None


# Closing


def test_unload_and_close_name_open_leases() -> None:
    """They do not wait for a lease of their own thread."""
    host = ModelHost(Stub, name="stub")
    assert host.unload().freed_bytes == {}
    assert host.load() and not host.load()
    with host.lease() as model:
        for end in (host.unload, host.close):
            where = rf"stub has 1 open lease: taken at .*{Path(__file__).name}:\d+ in test_unload"
            with pytest.raises(ModelInUseError, match=where):
                end()
        assert host.status().leases == 1
        with pytest.raises(ResourceClosedError):
            host.lease().__enter__()
    wait_for(lambda: host.status().state == "closed")
    assert model.closed == 1
    with ModelHost(Stub) as host, contextlib.ExitStack() as leases:
        for _ in range(12):
            leases.enter_context(host.lease())
        with pytest.raises(
            ModelInUseError, match=r"has 12 open leases.*; and 2 more; end"
        ) as caught:
            host.unload()
        assert str(caught.value).count("taken at") == 10


EXIT = """
import threading, time
from torch_utils import ModelHost, Resource, exit_on_signals
exit_on_signals()
begun = []
def hang():
    begun.append(1)
    time.sleep(600)
class Slow(Resource):
    def _release(self):
        hang()
kept = [ModelHost(hang) for _ in range(3)], [Slow() for _ in range(3)]
for target in [one.load for one in kept[0]] + [one.close for one in kept[1]]:
    threading.Thread(target=target, daemon=True).start()
while len(begun) < 6:
    time.sleep(0.01)
print("now", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_waits_at_exit_have_one_deadline_together() -> None:
    """It is 5 s: Docker kills after ten."""
    command = [sys.executable, "-W", "ignore", "-c", EXIT]
    env = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    how = {"stop_signal": signal.SIGTERM, "stop_when": "now", "max_shutdown_s": 60}
    report = check(command, timeout_s=600, env=env, **how)
    assert report.returncode == 143
    assert 4.5 < report.shutdown_s < 12, str(report)


HEAP = """
import threading, torch
from concurrent.futures import ThreadPoolExecutor
from torch_utils import ModelHost, memory_snapshot, release
host = ModelHost(object)
torch.zeros(30 << 18)  # Its end raises glibc's thresholds, as a loader's does.
release(torch.ones(1 << 20))
before = memory_snapshot().host
barrier = threading.Barrier(4)

def work(_):
    barrier.wait()
    model = [torch.ones(25_000) for _ in range(400)]
    barrier.wait()
    del model
    barrier.wait()

with ThreadPoolExecutor(4) as workers:
    list(workers.map(work, range(4)))
release(torch.ones(1 << 20))
print(round((memory_snapshot().host.anonymous_bytes - before.anonymous_bytes) / 1e6))
"""


@pytest.mark.slow
@pytest.mark.skipif(libc_ver()[0] != "glibc", reason="only glibc gives threads their own heaps")
def test_memory_of_threads_goes_back_to_the_system() -> None:
    """Without hosts, and with the program's own setting, glibc keeps it."""
    pytest.importorskip("torch")
    assert int(output_of(HEAP)) < 10
    assert int(output_of(HEAP.replace("ModelHost(object)", "None"))) > 40
    for env in ({"MALLOC_ARENA_MAX": "16"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=16"}):
        assert int(output_of(HEAP, env=env)) > 40


# Coroutines


def test_cancelled_coroutine_keeps_neither_lease_nor_thread() -> None:
    """At each step of a load, which continues for the next caller, and while it waits for a lease.

    Its function is not called later.
    """
    called: list[Stub] = []

    def load() -> Stub:
        time.sleep(0.01)
        return Stub()

    def workers() -> int:
        return sum(thread.name == "torch_utils-host" for thread in threading.enumerate())

    async def cancel(*calls: Any, after_s: float) -> None:
        tasks = list(map(asyncio.ensure_future, calls))
        await asyncio.sleep(after_s)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def main() -> None:
        async with ModelHost(load, keep_alive=-1, max_leases=1) as host:
            for steps in range(12):
                await cancel(host.alease().__aenter__(), after_s=0.002 * steps)
                assert host.status().leases == 0
            async with host.alease(timeout_s=60) as model:
                before = workers()
                await cancel(*[host.call(called.append) for _ in range(5)], after_s=0.05)
                assert workers() <= before and model.use()
            host.unload()
            await asyncio.sleep(0.05)
            assert (host.status().loads, host.status().leases, called) == (1, 0, [])

    run(main)


def test_alease_raises_load_errors_and_timeouts() -> None:
    """Also a StopIteration, which no coroutine can raise."""
    go_on = threading.Event()

    async def main() -> None:
        for load, error in (
            (lambda: 1 / 0, ZeroDivisionError),
            (lambda: go_on.wait() and Stub(), TimeoutError),
            (partial(sys.exit, 3), TorchUtilsError),
            (partial(next, iter(())), RuntimeError),
        ):
            go_on.clear()
            host = ModelHost(load)
            with pytest.raises(error):
                await host.alease(timeout_s=60 if error is not TimeoutError else 0.01).__aenter__()
            assert host.status().leases == 0
            go_on.set()
            await host.aclose()
        with ModelHost(Stub) as host, pytest.raises(RuntimeError, match="StopIteration"):
            await host.call(lambda model: next(iter(())))

    run(main)


def test_close_waits_for_leases_and_refuses_new_ones() -> None:
    """`aclose` does it without blocking the loop; `close` would wait for itself there."""

    async def main() -> None:
        host = ModelHost(Stub)
        async with host.alease() as model:
            began = time.monotonic()
            with pytest.raises(ModelInUseError, match="by a coroutine"):
                host.close()
            assert time.monotonic() - began < 5  # It would wait for 10 s.
        await wait_for_async(lambda: host.status().state == "closed")
        assert model.closed == 1
        async with ModelHost(Stub) as host:
            lease = host.alease()
            model = await lease.__aenter__()
            closing = asyncio.create_task(host.aclose())
            await wait_for_async(lambda: host.closed)
            with pytest.raises(ResourceClosedError):
                host.lease().__enter__()
            assert host.status().state == "loaded" and model.use()
            await lease.__aexit__(None, None, None)
            await closing
            assert (host.status().state, model.closed) == ("closed", 1)

    run(main)


# Interrupts, signal handlers and destructors in a lease, a load and an unload


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a destructor
def test_interrupted_lease_is_not_counted_and_host_still_lends() -> None:
    """An interrupt between the load and its end discards one model."""
    lost: list[Place] = []

    def check(place: Place) -> None:
        Stub.made.clear()
        host = ModelHost(Stub, keep_alive=0)
        place.run(lambda: (lend(host), host.unload()))
        assert place.propagated == place.delivered
        gc.collect()
        wait_for(lambda: host.status().leases == 0)
        with host.lease(timeout_s=60) as model:
            assert model.use()
        host.close()
        closed = [stub.closed for stub in Stub.made]
        assert closed in ([1], [1, 1], [0, 1])
        lost.extend([place] * closed.count(0))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        how = {"package": "torch_utils", "minimum": 66, "at_most": 200}
        count = interrupt_everywhere(check, **how, deliver=send_sigint)
        assert len(lost) <= max(count // 50, 1), lost
        gc.collect()  # What an interrupt kept from its owner says so when it goes.


def test_interrupted_load_raises_only_in_its_thread() -> None:
    """The other threads load the model themselves, once."""
    tries = []

    def load() -> Stub:
        tries.append(1)
        if len(tries) == 1:
            raise Interrupt
        return Stub()

    with ModelHost(load) as host:
        errors = errors_in_threads(*[partial(lend, host)] * 4)
        assert [type(error) for error in errors] == [Interrupt]
        assert (host.status().loads, len(tries)) == (1, 2)


def alend(host: ModelHost[Any]) -> None:
    run(host.alease().__aenter__)


@pytest.mark.parametrize("ask", [lend, alend, ModelHost.load, ModelHost.unload, ModelHost.close])
def test_load_and_close_refuse_to_wait_for_themselves(ask: Callable[[Any], object]) -> None:
    host: ModelHost[Any] = ModelHost(lambda: ask(host), name="snake")
    with pytest.raises(TorchUtilsError) as caught:
        host.load()
    assert ask is not lend or "cannot lease snake from its own load" in str(caught.value)
    host.close()
    refused = []

    def close() -> None:
        try:
            ask(host)
        except TorchUtilsError:
            refused.append(1)

    with ModelHost(partial(SimpleNamespace, close=close)) as host:
        host.load()
        host.unload()
    assert refused or ask is ModelHost.close
