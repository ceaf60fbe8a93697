"""Tests of leases: their order, their limit, calls from coroutines, and their ends."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="attr-defined, arg-type, assignment, func-returns-value, operator"
# mypy: disable-error-code="var-annotated"

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest

from tests.support.hosting_stub import Stub, run
from tests.support.threads import errors_in_threads
from tests.support.waiting import wait_for, wait_for_async
from torch_utils import ModelHost, ModelInUseError, TorchUtilsError


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
    status = host.status()
    assert status.loads == status.unloads == len(Stub.made)
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

    def begin(*ask: Any) -> threading.Thread:
        thread = threading.Thread(target=partial(*ask))
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
    with ModelHost(lambda: AsyncLoader()()) as host:
        with pytest.raises(TypeError, match=r"has to be awaited.*with a plain function"):
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
    host = ModelHost(Stub, keep_alive=0)
    lease = host.lease()
    lease.__enter__()
    with pytest.raises(TorchUtilsError, match="entered once"):
        lease.__enter__()
    del lease
    wait_for(lambda: host.status().state == "unloaded")
    host.close()
