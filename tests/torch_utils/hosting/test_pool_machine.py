"""Hosts and pools against a model of a few lines, by hypothesis' state machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from torch_utils import ModelInUseError, ModelPool, NoRoomError, ResourceClosedError
from torch_utils.hosting import host
from torch_utils.hosting.core import Core
from torch_utils.hosting.tenancy import Tenancy
from torch_utils.hosting.tenants import Tenant

SIZES = {"a": 1, "b": 2, "c": 3, "d": 3}
BUDGET, MOST, KEEP_S = 6, 3, 10.0
NAMES = st.sampled_from(sorted(SIZES))


class Clock:
    """Time that a test moves, and the timer that goes by it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: dict[Callable[[], object], float] = {}

    def __call__(self) -> float:
        return self.now

    def call_at(self, when: float, method: Callable[[], object]) -> None:
        self.due[method] = min(when, self.due.get(method, when))

    def call_soon(self, method: Callable[[], object]) -> None:
        self.due[method] = self.now

    def cancel(self, method: Callable[[], object]) -> None:
        self.due.pop(method, None)

    def move(self, seconds: float) -> None:
        self.now += seconds
        for method, when in list(self.due.items()):
            if when <= self.now and self.due.pop(method, None) is not None:
                method()


class Loaded(Tenant):
    """A model of a size, which knows whether it was given back."""

    def __init__(self, name: str, load: Callable[[], int]) -> None:
        self.is_given_back = False
        self.added_bytes = {"host": load()}
        self.model = self

    def _release(self) -> None:
        self.is_given_back = True


class Pools(RuleBasedStateMachine):
    """A pool of four, of which three or six bytes fit."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.patches = contextlib.ExitStack()
        patch = self.patches.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(host, "Core", partial(Core, clock=self.clock, timer=self.clock))
        patch.setattr(host, "ThreadTenant", Loaded)
        self.pool = ModelPool(budget_bytes=BUDGET, max_loaded=MOST, keep_alive=KEEP_S)
        self.failing: set[str] = set()
        for name in SIZES:
            self.pool.add(name, partial(self.load, name))
        # The model: who is lent, and since when the others are idle.
        self.leases: list[tuple[str, Any, Loaded]] = []
        self.closed: set[str] = set()

    def load(self, name: str) -> int:
        if name in self.failing:
            raise OSError(name)
        return SIZES[name]

    def lent(self) -> set[str]:
        return {name for name, _, _ in self.leases}

    def state(self, name: str) -> str:
        return self.pool.status()[name].state

    @rule(name=NAMES)
    def lease(self, name: str) -> None:
        lease = self.pool.lease(name, timeout_s=0)
        was_loaded = self.state(name) == "loaded"
        others = self.lent() - {name}
        try:
            model = lease.__enter__()
        except ResourceClosedError:
            assert name in self.closed
        except OSError:
            assert name in self.failing
            assert not was_loaded
        except NoRoomError:
            taken = sum(SIZES[other] for other in others)
            assert taken + SIZES[name] > BUDGET or len(others) >= MOST
        else:
            assert name not in self.closed
            self.leases.append((name, lease, model))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.leases:
            name, lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            lease.__exit__(None, None, None)
            if name in self.closed and name not in self.lent():
                assert self.state(name) == "closed"

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        if name in self.closed:
            return
        try:
            self.pool.unload(name)
        except ModelInUseError:
            assert name in self.lent()
        else:
            assert self.state(name) == "unloaded"

    @rule(name=NAMES)
    def break_or_mend(self, name: str) -> None:
        self.failing ^= {name}

    @rule(seconds=st.sampled_from([1.0, KEEP_S / 2, KEEP_S]))
    def wait(self, seconds: float) -> None:
        idle = {n: s.idle_s for n, s in self.pool.status().items() if s.idle_s is not None}
        self.clock.move(seconds)
        for name, idle_s in idle.items():
            assert (self.state(name) == "loaded") == (idle_s + seconds < KEEP_S), name

    @rule(name=NAMES)
    def close_one(self, name: str) -> None:
        self.closed.add(name)
        try:
            self.pool._hosts[name].close(deadline_s=0)
        except ModelInUseError:
            assert name in self.lent()

    @invariant()
    def nobody_who_is_lent_was_given_back(self) -> None:
        for name, _, model in self.leases:
            assert not model.is_given_back, name

    @invariant()
    def all_fits(self) -> None:
        status = self.pool.status()
        loaded = [name for name, one in status.items() if one.state == "loaded"]
        assert sum(SIZES[name] for name in loaded) <= BUDGET
        assert len(loaded) <= MOST
        for name, one in status.items():
            assert one.leases == sum(other == name for other, _, _ in self.leases)

    def teardown(self) -> None:
        for _, lease, _ in self.leases:
            lease.__exit__(None, None, None)
        self.pool.close()
        assert {one.state for one in self.pool.status().values()} == {"closed"}
        self.patches.close()


FEW = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_pools() -> None:
    """Whatever is asked for, in whatever order."""
    run_state_machine_as_test(Pools, settings=FEW)


@pytest.mark.slow
def test_many_pools() -> None:
    """More of the same."""
    run_state_machine_as_test(Pools, settings=settings(FEW, max_examples=500))


def test_machine_finds_a_planted_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that makes room by unloading what is lent."""

    def start_unloading(tenancy: Tenancy) -> None:
        tenancy._go("unloading", "loaded")

    monkeypatch.setattr(Tenancy, "can_make_room", lambda tenancy: tenancy.state == "loaded")
    monkeypatch.setattr(Tenancy, "start_unloading", start_unloading)
    with pytest.raises(AssertionError):
        # Until it is found, which a few are not always enough for.
        until = settings(FEW, max_examples=2000, phases=[Phase.generate])
        run_state_machine_as_test(Pools, settings=until)
