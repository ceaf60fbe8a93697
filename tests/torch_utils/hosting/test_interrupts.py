"""Tests of interrupts, signal handlers and destructors in a lease, a load and an unload."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="func-returns-value, operator"

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.hosting_stub import Stub
from tests.support.interrupts import Interrupt, Place, interrupt_everywhere, send_sigint
from tests.support.threads import errors_in_threads
from tests.support.waiting import wait_for
from torch_utils import ModelHost, TorchUtilsError


def lend(host: ModelHost[Stub]) -> None:
    with host.lease() as model:
        model.use()


@pytest.mark.slow
@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a destructor
def test_interrupted_lease_is_not_counted_and_host_still_lends() -> None:
    """An interrupt between the load and its end discards one model."""

    def check(place: Place) -> None:
        Stub.made.clear()
        host = ModelHost(Stub, keep_alive=0)

        def use() -> None:
            lend(host)
            host.unload()

        place.run(use)
        assert place.propagated == place.delivered
        gc.collect()
        wait_for(lambda: host.status().leases == 0)
        with host.lease(timeout_s=60) as model:
            assert model.use()
        host.close()
        assert len(Stub.made) <= 2
        if [stub.closed for stub in Stub.made] != [1] * len(Stub.made):
            assert [stub.closed for stub in Stub.made] == [0, 1]
            lost.append(place)

    lost: list[Place] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        count = interrupt_everywhere(
            check,
            package="torch_utils",
            minimum=66,
            at_most=200,
            deliver=send_sigint,
        )
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

    host = ModelHost(load)
    errors = errors_in_threads(*[lambda: host.lease().__enter__()] * 4)
    assert [type(error) for error in errors] == [Interrupt]
    gc.collect()
    assert (host.status().loads, len(tries)) == (1, 2)
    host.close()


ASKS = {"lease": lend, "load": ModelHost.load, "unload": ModelHost.unload, "close": ModelHost.close}


async def alease(host: ModelHost[Stub]) -> None:
    async with host.alease():
        pass


@pytest.mark.parametrize(
    "ask", [*ASKS.values(), lambda host: asyncio.run(alease(host))], ids=[*ASKS, "alease"]
)
def test_load_and_close_refuse_to_wait_for_themselves(ask: Callable[[Any], object]) -> None:
    host: ModelHost[Any] = ModelHost(lambda: ask(host), name="snake")
    with pytest.raises(TorchUtilsError) as caught:
        host.load()
    if ask is lend:
        assert "cannot lease snake from its own load function" in str(caught.value)
    host.close()
    errors: list[type] = []

    class Asking(Stub):
        def close(self) -> None:
            super().close()
            try:
                ask(host)
            except TorchUtilsError as error:
                errors.append(type(error))

    host = ModelHost(Asking)
    host.load()
    host.unload()
    host.close()
    assert errors or ask is ModelHost.close
