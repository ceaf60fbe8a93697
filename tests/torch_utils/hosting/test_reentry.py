"""Who asks in the middle of something: a signal handler, a destructor, what loads or closes."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
from hosting_stub import Stub
from interrupts import everywhere, run_interrupted

from torch_utils import (
    ModelHost,
    ModelInUseError,
    ModelPool,
    NoRoomError,
    ResourceClosedError,
    TorchUtilsError,
)
from watching import wait_for


def lend(host: ModelHost[Stub]) -> None:
    with host.lease() as model:
        model.use()


ASKS = {"lease": lend, "load": ModelHost.load, "unload": ModelHost.unload, "close": ModelHost.close}


@pytest.mark.parametrize("ask", ASKS)
def test_signal_handlers_do_it_or_are_refused(ask: str) -> None:
    """At any instruction of a lease, a load and an unload; none waits for its own thread."""
    counts = {"done": 0, "refused": 0}

    def check(number: int) -> bool:
        host = ModelHost(Stub, keep_alive=0 if number % 2 else -1)

        def handler() -> None:
            try:
                ASKS[ask](host)
                counts["done"] += 1
            except TorchUtilsError:
                counts["refused"] += 1

        def use() -> None:
            try:
                lend(host)
            except ResourceClosedError:
                assert ask == "close"

        files = ("hosting/core.py", "hosting/lending.py", "hosting/lease.py")
        ended, _ = run_interrupted(use, number, *files, handler=handler)
        assert host.status().leases == 0
        if host.closed:
            wait_for(lambda: host.status().state == "closed")
        else:
            lend(host)
        host.close()
        return ended

    everywhere(check, step=29)
    assert all(counts.values())
    assert all(stub.closed == 1 for stub in Stub.made)


def test_what_loads_or_closes_asks_for_itself() -> None:
    """Nobody waits for himself: by a lease, a coroutine's too, a load, an unload, a close."""

    async def alease() -> None:
        async with host.alease():
            pass

    asks = (
        lend,
        ModelHost.load,
        ModelHost.unload,
        ModelHost.close,
        lambda _: asyncio.run(alease()),
    )
    for ask in asks:
        host = ModelHost(lambda: ask(host))
        with pytest.raises(TorchUtilsError):
            host.load()
        host.close()
        heard: list[type] = []

        class Asking(Stub):
            def close(self) -> None:
                super().close()
                try:
                    ask(host)
                except TorchUtilsError as error:
                    heard.append(type(error))

        host = ModelHost(Asking)
        host.load()
        host.unload()
        host.close()
        assert heard or ask is ModelHost.close


def test_dropped_generator_ends_its_lease_at_any_moment() -> None:
    """Its block is left by the collector, in the middle of another lease of its thread."""

    def generate(host: ModelHost[Stub]):
        with host.lease() as model:
            yield model.use()

    def check(number: int) -> bool:
        host = ModelHost(Stub, keep_alive=-1)
        pending = [generate(host)]
        next(pending[0])
        files = ("hosting/core.py", "hosting/lending.py")
        ended, _ = run_interrupted(lambda: lend(host), number, *files, handler=pending.clear)
        pending.clear()
        wait_for(lambda: host.status().leases == 0)
        host.close()
        return ended

    everywhere(check, step=23)
    gc.collect()


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_what_loads_needs_the_room_it_has_taken(as_coroutine: bool) -> None:
    """A loader that leases another model of a pool of one: that can never be."""

    def load() -> Stub:
        with pool.lease("inner"):
            return Stub()

    async def ask() -> None:
        async with pool.alease("outer"):
            pass

    with ModelPool(max_loaded=1) as pool:
        pool.add("inner", Stub)
        pool.add("outer", load)
        with pytest.raises(NoRoomError, match="outer has 0 B"):
            if as_coroutine:
                asyncio.run(ask())
            else:
                pool.lease("outer").__enter__()
        with pool.lease("inner") as model:
            assert model.use()


def test_two_loads_that_need_each_other_in_time() -> None:
    """Across threads nobody can see it, but a lease's time ends it."""
    both = threading.Barrier(2)

    def load(name: str) -> None:
        both.wait()
        hosts[name].lease(timeout_s=0.2 if name == "b" else 60).__enter__()

    hosts = {"a": ModelHost(lambda: load("b")), "b": ModelHost(lambda: load("a"))}
    errors = []

    def run(name: str) -> None:
        try:
            hosts[name].load()
        except BaseException as error:
            errors.append(type(error))

    threads = [threading.Thread(target=run, args=(name,)) for name in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert TimeoutError in errors
    for host in hosts.values():
        host.close()


def test_close_in_a_handler_while_it_loads() -> None:
    """The handler hears at once that it is loading; when it is there, it is given back."""
    host = ModelHost(lambda: (close(), Stub())[1])

    def close() -> None:
        began = time.monotonic()
        with pytest.raises(ModelInUseError, match="is loading"):
            host.close(deadline_s=600)
        assert time.monotonic() - began < 300

    with pytest.raises(ResourceClosedError):
        host.load()
    assert host.status().state == "closed"
    assert [stub.closed for stub in Stub.made] == [1]
