"""A host loads once, lends safely, unloads what is idle, and tells who has it."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path

import pytest
from hosting_stub import Stub, in_threads
from interrupts import Interrupt, everywhere, run_interrupted

from torch_utils import (
    CleanupReport,
    ModelHost,
    ModelInUseError,
    ResourceClosedError,
    TorchUtilsError,
)
from torch_utils.hosting.core import Core
from torch_utils.hosting.tenants import ThreadTenant
from watching import wait_for


def test_many_threads_load_once() -> None:
    """All get the same model, and asking for the status loads nothing."""
    host = ModelHost(lambda: (time.sleep(0.05), Stub())[1], name="stub")
    assert (host.status().state, len(Stub.made)) == ("unloaded", 0)
    models = []

    def work() -> None:
        with host.lease() as model:
            models.append(model)

    assert in_threads(64, work) == []
    assert len(set(map(id, models))) == 1
    status = host.status()
    assert (status.state, status.loads, status.leases, status.name) == ("loaded", 1, 0, "stub")
    assert 0 <= status.idle_s < 300
    assert 0 < status.expires_in_s <= 300
    host.close()
    assert [stub.closed for stub in Stub.made] == [1]


@pytest.mark.parametrize("kind", [OSError, StopIteration])
def test_failed_load_reaches_everybody_and_can_be_tried_again(kind: type[Exception]) -> None:
    """Each waiter gets its error; the next lease loads."""
    fails, begun = [True], threading.Semaphore(0)

    def load() -> Stub:
        if fails[0]:
            wait_for(lambda: len(host._core.tenancy.wanted) == 16)
            raise kind("no weights")
        return Stub()

    host = ModelHost(load)
    assert [repr(e) for e in in_threads(16, lambda: host.lease().__enter__())] == [
        f"{kind.__name__}('no weights')"
    ] * 16
    status = host.status()
    assert (status.state, status.loads, str(status.last_error)) == ("unloaded", 0, "no weights")
    fails[0] = False
    with host.lease() as model:
        assert model.use()
    assert host.status().last_error is None
    host.close()
    del begun


def test_failed_load_keeps_nothing_alive() -> None:
    """What it had loaded before it failed does not live on in the error's frames."""

    def load() -> None:
        half = Stub()
        Stub.made.clear()
        sys.modules[__name__].half = __import__("weakref").ref(half)
        raise OSError("disk")

    host = ModelHost(load)
    with pytest.raises(OSError, match="disk"):
        host.load()
    gc.collect()
    assert sys.modules[__name__].half() is None
    assert host.status().last_error is not None
    host.close()


def test_never_unloaded_under_a_lease() -> None:
    """Callers, an unloader and a short keep_alive fight; nobody meets a closed model."""
    host = ModelHost(Stub, keep_alive="10ms")
    stop = threading.Event()
    refused = []

    def unload() -> None:
        while not stop.is_set():
            try:
                host.unload()
            except ModelInUseError:
                refused.append(1)

    unloader = threading.Thread(target=unload)
    unloader.start()

    def work() -> None:
        for _ in range(150):
            with host.lease() as model:
                for _ in range(20):
                    model.use()
            time.sleep(random.random() / 100)

    errors = in_threads(6, work)
    stop.set()
    unloader.join()
    assert errors == []
    assert refused
    host.close()
    status = host.status()
    assert status.loads == status.unloads == len(Stub.made) > 1
    assert all(stub.closed == 1 for stub in Stub.made)


def test_control_without_the_count_of_leases_it_is_unloaded(monkeypatch) -> None:
    """The fight above finds a host that forgets who has its model."""
    monkeypatch.setattr("torch_utils.hosting.tenancy.Tenancy.can_unload", lambda t: t.tenant_there)
    from torch_utils.hosting.tenancy import Tenancy

    monkeypatch.setattr(Tenancy, "tenant_there", property(lambda t: t.state == "loaded"), False)
    monkeypatch.setattr(Tenancy, "start_unloading", lambda t: t._go("unloading", "loaded"))
    host = ModelHost(Stub)
    with host.lease() as model:
        host._core._take_out(host._core.tenancy.can_unload, "asked")
        with pytest.raises(AssertionError):
            model.use()
    host.close()


def test_idle_ones_expire_and_are_loaded_again() -> None:
    """By the timer, whose thread is there only as long as something is to come."""
    host = ModelHost(Stub, keep_alive=0.02)
    for count in (1, 2):
        with host.lease() as model:
            time.sleep(0.05)
            assert model.use()
        wait_for(lambda: host.status().state == "unloaded")
        assert host.status().unloads == count
    wait_for(lambda: "torch_utils-timer" not in [t.name for t in threading.enumerate()])
    host.close()


def test_keep_alive_of_zero_and_of_ever() -> None:
    """Gone when the block has ended; or still there."""
    host = ModelHost(Stub, keep_alive=0)
    with host.lease() as outer, host.lease() as inner:
        assert outer is inner
    assert host.status().state == "unloaded"
    host.load()
    assert host.status().state == "loaded"
    forever = ModelHost(Stub, keep_alive=-1)
    with forever.lease():
        pass
    assert forever.status().expires_in_s is None
    host.close()
    forever.close()


def test_unload_says_who_has_it() -> None:
    """Where in the program the lease was taken; and it reports what came back."""
    host = ModelHost(Stub)
    assert isinstance(host.unload(), CleanupReport)
    with host.lease():
        with pytest.raises(
            ModelInUseError, match=rf"{Path(__file__).name}:\d+ in test_unload_says"
        ):
            host.unload()
        assert host.status().leases == 1
    assert host.load() is False
    host.unload()
    assert host.load() is True
    host.close()


def test_close_waits_for_leases() -> None:
    """And lends nothing meanwhile."""
    host = ModelHost(Stub)
    lent, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with host.lease() as model:
            lent.set()
            go_on.wait()
            model.use()

    worker = threading.Thread(target=work)
    worker.start()
    lent.wait()
    closer = threading.Thread(target=host.close)
    closer.start()
    wait_for(lambda: host._core.tenancy.is_closing)
    with pytest.raises(ResourceClosedError):
        host.lease().__enter__()
    go_on.set()
    closer.join()
    worker.join()
    assert host.status().state == "closed"
    assert Stub.made[0].closed == 1


def test_close_names_who_has_it_after_the_deadline() -> None:
    """The model lives until the lease ends; a lease of the closing thread is not waited for."""
    host = ModelHost(Stub)
    with host.lease() as model:
        with pytest.raises(ModelInUseError, match="in test_close_names"):
            host.close()
        assert model.use()
        with pytest.raises(ResourceClosedError):
            host.lease().__enter__()
    assert host.status().state == "closed"
    assert model.closed == 1


def test_wait_for_others_ends_in_time() -> None:
    """A lease that waits for another's load gives up, and leaves nothing behind."""
    begun, go_on = threading.Event(), threading.Event()

    def load() -> Stub:
        begun.set()
        go_on.wait()
        return Stub()

    host = ModelHost(load)
    loader = threading.Thread(target=host.load)
    loader.start()
    begun.wait()
    with pytest.raises(TimeoutError, match=r"still loading after 0\.01 s"):
        host.lease(timeout_s=0.01).__enter__()
    go_on.set()
    loader.join()
    assert host.status().leases == 0
    host.unload()
    host.close()


def test_load_that_asks_for_its_own_lease() -> None:
    """Is told so, instead of waiting for itself for ever."""
    host: ModelHost[object] = ModelHost(lambda: host.lease().__enter__(), name="snake")
    with pytest.raises(TorchUtilsError, match="what loads snake asks for a lease of snake"):
        host.load()
    host.close()


def test_lease_that_is_dropped_has_ended() -> None:
    """By its destructor, wherever it is collected; one is entered once."""
    host = ModelHost(Stub, keep_alive=0)
    lease = host.lease()
    lease.__enter__()
    with pytest.raises(TorchUtilsError, match="entered once"):
        lease.__enter__()
    del lease
    wait_for(lambda: host.status().state == "unloaded")
    host.close()


def test_models_that_release_does_not_know() -> None:
    """Functions and plain objects are lent too, and go with their last reference."""
    host = ModelHost(lambda: lambda text: text[::-1])
    with host.lease() as model:
        assert model("ab") == "ba"
    assert isinstance(host.unload(), CleanupReport)
    host.close()
    with ModelHost(lambda: None) as host, pytest.raises(TypeError, match="returned None"):
        host.load()
    with ModelHost(lambda: asyncio.sleep(0)) as host, pytest.raises(TypeError, match="is async"):
        host.load()


@pytest.mark.parametrize("what", [5, None, asyncio.sleep])
def test_what_does_not_load(what) -> None:
    """Refused before anything happens."""
    with pytest.raises(TypeError, match="load must be a function"):
        ModelHost(what)
    with pytest.raises(ValueError, match="isolation must be"):
        ModelHost(Stub, isolation="fork")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a destructor
def test_interrupts_leave_no_lease_and_no_half_load() -> None:
    """At any instruction of loading, leasing and unloading; afterwards all goes on as before."""
    counts = {"arrived": 0}

    def check(number: int) -> bool:
        host = ModelHost(Stub, keep_alive=0 if number % 2 else "5m")

        def use() -> None:
            with host.lease() as model:
                model.use()
            host.unload()

        ended, arrived = run_interrupted(
            use, number, "hosting/core.py", "hosting/lending.py", "hosting/lease.py"
        )
        counts["arrived"] += arrived
        gc.collect()
        wait_for(lambda: host.status().leases == 0)
        with host.lease(timeout_s=60) as model:
            assert model.use()
        host.close()
        return ended

    gc.collect()
    gc.freeze()  # To collect what a check has left takes no walk over all that others have.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            everywhere(check, step=29)
            gc.collect()  # What an interrupt kept from its owner says so when it goes.
    finally:
        gc.unfreeze()
    assert counts["arrived"] > 20
    assert all(stub.closed == 1 for stub in Stub.made)


def test_interrupt_of_a_load_is_its_threads_alone() -> None:
    """Those who wait load it themselves."""
    tries = []

    def load() -> Stub:
        tries.append(1)
        if len(tries) == 1:
            wait_for(lambda: len(host._core.tenancy.wanted) == 4)
            raise Interrupt
        return Stub()

    host = ModelHost(load)
    errors = in_threads(4, lambda: host.lease().__enter__())
    assert [type(error) for error in errors] == [Interrupt]
    gc.collect()
    assert (host.status().loads, len(tries)) == (1, 2)
    host.close()


def test_fork_has_a_host_that_is_not_loaded() -> None:
    """It loads a model of its own, and closes that alone."""
    host = ModelHost(Stub)
    with host.lease() as mine:
        if os.fork() == 0:
            status = 1
            try:
                assert host.status().state == "unloaded"
                assert len(threading.enumerate()) == 1
                with host.lease() as own:
                    assert own is not mine
                host.close()
                status = 0 if (own.closed, mine.closed) == (1, 0) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        assert mine.use()
    host.close()
    assert mine.closed == 1


def test_fake_clock_and_timer() -> None:
    """What the timer is asked to do, without waiting for it."""
    now, calls = [100.0], []

    class Clockwork:
        def call_at(self, when, method) -> None:
            calls.append(when)

        def cancel(self, method) -> None:
            calls.append("cancelled")

    core = Core(
        "stub", partial(ThreadTenant, "stub", Stub), 60, clock=lambda: now[0], timer=Clockwork()
    )
    assert core.load_now()
    assert calls == [160.0]
    now[0] = 159
    core.expire()
    assert (core.status().state, calls[-1]) == ("loaded", 160.0)
    now[0] = 160
    core.expire()
    assert (core.status().state, calls[-1]) == ("unloaded", "cancelled")
    core.shut(0)
