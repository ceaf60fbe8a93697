"""Hosts and coroutines, whose loop never stands still; and models in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from hosted_models import Model
from hosting_stub import Stub, run

from torch_utils import (
    ModelHost,
    ModelProcessError,
    ResourceClosedError,
    TorchUtilsError,
)

# Coroutines


def test_coroutines_load_once_and_do_not_stop_the_loop() -> None:
    """The loop goes round while the model is loaded, by a thread that ends with that."""
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


def test_cancelled_coroutines_leave_no_lease() -> None:
    """At each step that they may be at; the load goes on, and is there for the next."""

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
            assert not host._core.tenancy.wanted
        async with host.alease(timeout_s=60) as model:
            assert model.use()
        await host.aclose()

    run(main)


@pytest.mark.parametrize("error", [OSError("no such file"), SystemExit(3)])
def test_load_that_fails_at_once_is_tried_once(monkeypatch, error: BaseException) -> None:
    """Even if it is over before the coroutine can ask; it used to try again, in the loop."""

    class Eager(threading.Thread):
        def start(self) -> None:
            super().start()
            self.join()

    tries: list[int] = []

    def load() -> Stub:
        tries.append(1)
        if len(tries) < 5:
            raise error
        return Stub()

    async def main() -> None:
        monkeypatch.setattr("torch_utils.hosting.core.threading.Thread", Eager)
        async with ModelHost(load) as host:
            with pytest.raises(OSError if isinstance(error, OSError) else TorchUtilsError):
                await host.alease().__aenter__()
            monkeypatch.undo()
            assert (len(tries), host.status().leases) == (1, 0)

    run(main)


def test_what_was_loaded_for_one_that_gave_up_expires() -> None:
    """A ``keep_alive`` of 0 keeps what is loaded beforehand, not what nobody waits for any more."""
    go_on = threading.Event()

    async def main() -> None:
        async with ModelHost(lambda: (go_on.wait(), Stub())[1], keep_alive=0) as host:
            task = asyncio.create_task(host.alease().__aenter__())
            while host.status().state != "loading":
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            go_on.set()
            while host.status().unloads != 1:
                await asyncio.sleep(0.001)

    run(main)


def test_coroutines_hear_of_errors_and_of_time() -> None:
    """A load that fails, one that takes too long, one that wants to end the program."""
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


def test_aclose_waits_off_the_loop() -> None:
    """For a lease of a coroutine of the same loop."""

    async def main() -> None:
        host = ModelHost(Stub, keep_alive=0)
        entered = asyncio.Event()

        async def work() -> None:
            async with host.alease() as model:
                entered.set()
                await asyncio.sleep(0.05)
                model.use()

        async with host:
            task = asyncio.create_task(work())
            await entered.wait()
        await task
        assert host.status().state == "closed"

    run(main)


# In a process of its own


@pytest.fixture
def hosted():
    host = ModelHost(Model, isolation="process", keep_alive=-1)
    yield host
    host.close()


def test_process_is_a_proxy(hosted) -> None:
    """Methods, attributes and the call travel; the lease's end is the proxy's."""
    with hosted.lease() as model:
        pid = model.pid()
        assert pid != os.getpid()
        assert (model.echo(1, key=2), model.dimension, model(3)) == ((1, {"key": 2}), 3, [3])
        assert hosted.status().nbytes > 1_000_000
        with pytest.raises(AttributeError):
            _ = model.nothing
        with pytest.raises(AttributeError, match="cannot be set"):
            model.dimension = 4
    with pytest.raises(ResourceClosedError, match="has ended"):
        model.echo(1)
    report = hosted.unload()
    assert report.freed_bytes["host"] > 1_000_000
    assert not Path(f"/proc/{pid}").exists()
    assert hosted.status().state == "unloaded"


def test_process_that_crashes_is_started_again(hosted) -> None:
    """In a call, or between leases; every lease but the one that met it is whole."""
    with hosted.lease() as model, pytest.raises(ModelProcessError, match="exit code 4"):
        model.leave("_exit")
    with hosted.lease() as model:
        pid = model.pid()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with hosted.lease() as model:
        assert model.pid() != pid
    status = hosted.status()
    assert (status.loads, status.unloads) == (3, 2)


def test_cancelled_call_does_not_hang(hosted, tmp_path: Path) -> None:
    """The caller is cancelled in a method of ten minutes: its process ends, and its thread too."""
    begun = tmp_path / "begun"

    async def main() -> None:
        async def work() -> None:
            async with hosted.alease() as model:
                await asyncio.to_thread(model.touch_and_sleep, str(begun))

        task = asyncio.create_task(work())
        while not begun.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        async with hosted.alease() as model:
            assert await asyncio.to_thread(model.echo, 5) == 5

    run(main)  # Its end waits for the thread.
    assert hosted.status().loads == 2


def test_what_another_process_cannot_find() -> None:
    """Refused when the host is made."""
    with pytest.raises(TypeError, match='isolation="thread"'):
        ModelHost(lambda: 1, isolation="process")
