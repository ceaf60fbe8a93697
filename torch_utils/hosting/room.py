"""Room: what several hosts may have loaded at once, and who goes so that another one fits."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping

from torch_utils.errors import NoRoomError
from torch_utils.hosting.attempt import Attempt
from torch_utils.hosting.core import Core
from torch_utils.hosting.tenants import Tenant
from torch_utils.hosting.waiting import ThreadWaiter
from torch_utils.report import format_bytes

__all__ = ["Room"]

Sizes = Mapping[str, int]


class Room:
    """The limits of a pool, which each load of its hosts keeps.

    Only the thread that loads a model waits here, and it holds no lock meanwhile. What a model
    needs is what its last load was measured to add. Before the first one that is not known, so
    that there has to be room once more when the model is there. A figure that may contain what
    the load imported counts for that load only.

    Args:
        budgets: Bytes, by "host" and device; "" is for all together.
        max_loaded: How many models.
        cores: Returns all that share this room.
        clock: Seconds that only grow.
    """

    def __init__(
        self,
        budgets: Sizes,
        max_loaded: int | None,
        cores: Callable[[], Iterable[Core]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budgets = dict(budgets)
        self._max_loaded = max_loaded
        self._cores = cores
        self._clock = clock
        self._lock = threading.RLock()  # For a signal handler that asks in the middle of it.
        self._measured: dict[str, Sizes] = {}  # by name, by the last load
        self._admitted: weakref.WeakKeyDictionary[Core, tuple[Attempt, Sizes]]
        self._admitted = weakref.WeakKeyDictionary()

    def make_room(self, core: Core, attempt: Attempt) -> None:
        """Unload idle models, the least recently used first, until a load fits.

        Raises:
            NoRoomError: The attempt's time is over, or it can never fit. Says who holds what.
            ResourceClosedError: The host was closed meanwhile.
        """
        self._wait_for(self._measured.get(core.name, {}), core, attempt)

    def check_room(self, core: Core, attempt: Attempt, tenant: Tenant) -> None:
        """The same once it is loaded; the caller gives it back where there is no room after all."""
        needed = {name: max(size, 0) for name, size in tenant.added_bytes.items()}
        if tenant.is_measured:
            self._measured[core.name] = needed
        self._admitted[core] = attempt, needed
        self._wait_for(needed, core, attempt)

    def start_over(self) -> None:
        """In a fork: its parent's thread that held the lock is not there to let go of it."""
        self._lock = threading.RLock()

    def _wait_for(self, needed: Sizes, core: Core, attempt: Attempt) -> None:
        while True:
            waiter = ThreadWaiter()
            core.wake_at_change(waiter.wake)
            core.ensure_open()
            others = [other for other in self._cores() if other is not core]
            for other in others:
                other.wake_at_change(waiter.wake)
            lacking = self._admit(needed, core, attempt, others)
            if not lacking:
                attempt.no_room = ""
                return
            is_final = bool(self._lacking([needed]))
            idle = [other for other in others if other.tenancy.can_make_room()]
            if idle and not is_final:
                min(idle, key=lambda one: one.tenancy.idle_since or 0.0).unload_if_idle()
                continue
            attempt.no_room = self._why(needed, core, lacking, others)
            left = None if attempt.deadline is None else attempt.deadline - self._clock()
            if is_final or (left is not None and left <= 0) or self._is_mine(others, attempt):
                attempt.gave_up = not is_final
                raise NoRoomError(attempt.no_room)
            waiter.wait(left)

    def _admit(self, needed: Sizes, core: Core, attempt: Attempt, others: list[Core]) -> str:
        """Take the room if it is there; otherwise say what is lacking."""
        with self._lock:  # Of two that load at once, one sees the other.
            used = [sizes for other in others if (sizes := self._used_by(other)) is not None]
            lacking = self._lacking([needed, *used])
            if not lacking:
                self._admitted[core] = attempt, needed
            return lacking

    def _used_by(self, core: Core) -> Sizes | None:
        """Return what a model takes, or is about to take; None while it takes nothing."""
        if core.tenancy.state in ("loaded", "unloading"):
            return core.tenancy.added_bytes
        attempt, needed = self._admitted.get(core, (None, None))
        return needed if core.is_at(attempt) else None

    def _lacking(self, sizes: list[Sizes]) -> str:
        """Name the limit that these would break; empty if none."""
        if self._max_loaded is not None and len(sizes) > self._max_loaded:
            return f"at most {self._max_loaded} may be loaded"
        for place, budget in self._budgets.items():
            used = [n for one in sizes for name, n in one.items() if place in ("", name) and n > 0]
            if sum(used) > budget:
                on = f" on {place}" if place else ""
                return f"the budget is {format_bytes(budget)}{on}"
        return ""

    def _is_mine(self, others: list[Core], attempt: Attempt) -> bool:
        """Say whether all that is in the way is the business of the very thread that waits."""
        for other in others:
            if self._used_by(other) is None or other.is_own_work():
                continue
            threads = {holder.thread for holder in list(other.tenancy.leases.values())}
            if threads != {attempt.thread}:
                return False
        return True

    def _why(self, needed: Sizes, core: Core, lacking: str, others: list[Core]) -> str:
        held = []
        for other in others:
            sizes = self._used_by(other)
            if sizes is not None:
                who = other.tenancy.holders(self._clock()) or f"it is {other.tenancy.state}"
                held.append(f"{other.name} has {format_bytes(_total(sizes))} ({who})")
        needs = f", and it needs {format_bytes(_total(needed))}" if needed else ""
        return (
            f"no room for {core.name}: {lacking}{needs}; {'; '.join(held) or 'nothing is loaded'}"
        )


def _total(sizes: Sizes) -> int:
    return sum(max(size, 0) for size in sizes.values())
