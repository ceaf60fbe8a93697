"""Room: what several hosts may load at once, and who goes so that another one fits."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping

from torch_utils.errors import NoRoomError
from torch_utils.hosting.core import Attempt, Core
from torch_utils.hosting.waiting import ThreadWaiter
from torch_utils.report import format_bytes

__all__ = ["Room"]

Sizes = Mapping[str, int]


class Room:
    """The limits of a pool, kept by each load of its hosts.

    Only the thread that loads a model waits here, and it holds no lock meanwhile: the lock is for
    deciding. What a model needs is what its last load was measured to add. Before the first load
    that is not known, so that it is looked at once more when the model is there.

    Args:
        limits: Bytes by "host" and device; "" is for all together.
        max_loaded: How many models.
        cores: Returns all that share this room.
    """

    def __init__(
        self, limits: Sizes, max_loaded: int | None, cores: Callable[[], Iterable[Core]]
    ) -> None:
        self._limits = dict(limits)
        self._max_loaded = max_loaded
        self._cores = cores
        self._lock = threading.Lock()
        self._sizes: dict[str, Sizes] = {}  # as measured by the last load, by name
        self._admitted: weakref.WeakKeyDictionary[Core, Attempt] = weakref.WeakKeyDictionary()

    def make(self, core: Core, attempt: Attempt) -> None:
        """Unload idle models, the least recently used first, until a load fits.

        Raises:
            NoRoomError: The attempt's time is over, or it can never fit. Says who holds what.
        """
        self._make(core, attempt, self._sizes.get(core.name, {}))

    def check(self, core: Core, attempt: Attempt, added_bytes: Sizes) -> None:
        """The same once it is loaded, and measured.

        Raises:
            NoRoomError: As above. The caller is to give back what it has loaded.
        """
        self._sizes[core.name] = {name: max(size, 0) for name, size in added_bytes.items()}
        self._make(core, attempt, self._sizes[core.name])

    def _make(self, core: Core, attempt: Attempt, needed: Sizes) -> None:
        while True:
            waiter = ThreadWaiter()
            others = [other for other in self._cores() if other is not core]
            for other in others:
                other.wake_at_change(waiter.wake)
            with self._lock:
                used = [self._used_by(other) for other in others]
                lacking = self._lacking([needed, *(sizes for sizes in used if sizes is not None)])
                if lacking is None:
                    self._admitted[core] = attempt
                    return
            idle = [other for other in others if other.tenancy.can_unload()]
            if idle:
                min(idle, key=lambda other: other.tenancy.used_at).unload_if_idle()
                continue
            left = attempt.left_s()
            alone = self._lacking([needed]) is not None
            if alone or left <= 0 or self._never_ends(others, attempt):
                raise NoRoomError(self._why(core, needed, lacking, others))
            waiter.wait(left)

    def _used_by(self, core: Core) -> Sizes | None:
        """Return what a model takes, or None while it takes nothing."""
        state = core.tenancy.state
        if state in ("loaded", "unloading"):
            return core.tenancy.added_bytes
        if state == "loading" and core.is_at(self._admitted.get(core)):
            return self._sizes.get(core.name, {})
        return None

    def _lacking(self, sizes: list[Sizes]) -> str | None:
        """Name the limit that these would break."""
        if self._max_loaded is not None and len(sizes) > self._max_loaded:
            return f"at most {self._max_loaded} may be loaded"
        for place, limit in self._limits.items():
            total = sum(max(n, 0) for one in sizes for name, n in one.items() if place in ("", name))
            if total > limit:
                where = f" on {place}" if place else ""
                return f"the budget is {format_bytes(limit)}{where}"
        return None

    def _never_ends(self, others: list[Core], attempt: Attempt) -> bool:
        """Say whether all that is in the way is lent to the very thread that waits."""
        holders = [h for other in others for h in list(other.tenancy.leases.values())]
        under_way = any(self._used_by(o) is not None and not o.tenancy.leases for o in others)
        return not under_way and all(holder.thread == attempt.thread for holder in holders)

    def _why(self, core: Core, needed: Sizes, lacking: str, others: list[Core]) -> str:
        now = time.monotonic()
        parts = []
        for other in others:
            used = self._used_by(other)
            if used is not None:
                holders = other.tenancy.holders(now) or f"it is {other.tenancy.state}"
                parts.append(f"{other.name} has {format_bytes(_total(used))} ({holders})")
        needs = f", and it needs {format_bytes(_total(needed))}" if needed else ""
        return f"no room for {core.name}: {lacking}{needs}; {'; '.join(parts) or 'nothing is loaded'}"


def _total(sizes: Sizes) -> int:
    return sum(max(size, 0) for size in sizes.values())
