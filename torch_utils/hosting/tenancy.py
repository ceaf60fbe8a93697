"""What is known of one hosted model: loaded or not, lent to whom, idle since when.

Pure bookkeeping, without threads, locks or a clock of its own: every method is told the time.
`Core` is what makes it safe.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch_utils.errors import TorchUtilsError, shown

__all__ = ["Holder", "HostStatus", "State", "Tenancy"]

State = Literal["unloaded", "loading", "loaded", "unloading", "closed"]


@dataclass(frozen=True)
class HostStatus:
    """One moment of a hosted model.

    Attributes:
        name: What its host calls it.
        state: "unloaded", "loading", "loaded", "unloading" or "closed".
        leases: How many are open.
        loads: How many times it was loaded.
        unloads: How many times it was given back, or its process was lost.
        nbytes: By how much loading was measured to add to this process or to its own, on the
            host and on devices together, without what it imported into this one if the model's
            tensors can be counted; 0 while it is not loaded.
        idle_s: Seconds since the last lease ended, or since it was loaded; None while it is lent
            or not loaded.
        expires_in_s: Seconds until it is unloaded if nobody wants it; None if it will not be.
        last_error: A copy of what the last load raised, without its traceback, which would keep
            the variables of the caller alive; None if it succeeded.
    """

    name: str
    state: State
    leases: int
    loads: int
    unloads: int
    nbytes: int
    idle_s: float | None
    expires_in_s: float | None
    last_error: BaseException | None


@dataclass(frozen=True)
class Holder:
    """Who has a lease: where in the program it was taken, by which thread, and when."""

    where: str
    thread: int | None  # None for a coroutine, whose thread goes on with others
    since: float


class Tenancy:
    """A model's states, and the leases of it.

    Args:
        keep_alive_s: How long an idle one is kept; None for ever. With 0 it goes when the last
            lease ends, but one that nobody has had or waited for yet is kept.
    """

    def __init__(self, keep_alive_s: float | None) -> None:
        self.keep_alive_s = keep_alive_s
        self.state: State = "unloaded"
        self.is_closing = False
        self.leases: dict[int, Holder] = {}
        self.wanted: set[int] = set()  # leases that somebody waits for
        self.loads = self.unloads = 0
        self.added_bytes: Mapping[str, int] = {}
        self.idle_since: float | None = None
        self.was_lent = False
        self.last_error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """What loading added, over all devices."""
        return sum(max(size, 0) for size in self.added_bytes.values())

    def _go(self, state: State, *allowed: State) -> None:
        """Change the state, after all else: an interrupt may come between any two lines."""
        self._check(state, *allowed)
        self.state = state

    def _check(self, state: State, *allowed: State) -> None:
        if self.state not in allowed:
            raise TorchUtilsError(f"a model that is {self.state} cannot become {state}")

    def start_loading(self) -> None:
        """Begin to load it."""
        if self.is_closing:
            raise TorchUtilsError("a host that is closing loads nothing")
        self._check("loading", "unloaded")
        self.was_lent = False
        self.state = "loading"

    def loaded(self, added_bytes: Mapping[str, int], now: float) -> None:
        """It is there; nobody has it yet."""
        self._check("loaded", "loading")
        self.added_bytes = added_bytes
        self.idle_since = now
        self.last_error = None
        self.loads += 1
        self.state = "loaded"

    def load_failed(self, error: BaseException | None) -> None:
        """It is not there; None if nothing is wrong with it, but the load was interrupted."""
        self._check("unloaded", "loading")
        if error is not None:
            self.last_error = _without_traceback(error)
        self.idle_since = None
        self._go("unloaded", "loading")
        self._close_if_asked()

    def lend(self, number: int, holder: Holder) -> None:
        """Begin a lease."""
        if self.state != "loaded" or self.is_closing:
            raise TorchUtilsError(f"a model that is {self.state} cannot be lent")
        self.leases[number] = holder
        self.idle_since = None
        self.was_lent = True

    def give_back(self, number: int, now: float) -> bool:
        """End a lease; False if it has ended before. The clock starts with the last one's end."""
        if self.leases.pop(number, None) is None:
            return False
        self._rest(now)
        return True

    def no_longer_wanted(self, number: int, now: float) -> bool:
        """Somebody got the lease, or gave up waiting for it; False if that was known."""
        was_wanted = number in self.wanted
        self.was_lent |= was_wanted  # It was loaded for somebody, who may have gone since.
        self.wanted.discard(number)
        self._rest(now)
        return was_wanted

    def _rest(self, now: float) -> None:
        if self.state == "loaded" and not self.leases and self.idle_since is None:
            self.idle_since = now

    def can_unload(self) -> bool:
        """Say whether it is there and nobody has it."""
        return self.state == "loaded" and not self.leases

    def expires_at(self) -> float | None:
        """Say when it goes if nobody wants it; None while somebody does, or if it stays."""
        idle_since = self.idle_since  # Read once: a signal handler may unload it meanwhile.
        if not self.can_unload() or self.wanted or idle_since is None:
            return None
        if self.is_closing:
            return idle_since
        if self.keep_alive_s is None or (self.keep_alive_s == 0 and not self.was_lent):
            return None
        return idle_since + self.keep_alive_s

    def can_make_room(self) -> bool:
        """Say whether it can go because another model needs its room."""
        return self.can_unload() and not self.wanted

    def start_unloading(self) -> None:
        """Begin to give it back; never under a lease."""
        if self.leases:
            raise TorchUtilsError("a model that is lent cannot be unloaded")
        self._go("unloading", "loaded")

    def unloaded(self) -> None:
        """It is gone."""
        self._check("unloaded", "unloading")
        self._forget()

    def lost(self) -> None:
        """It is gone although it may be lent: its process has ended, or the program is ending."""
        self._check("unloaded", "loaded")
        self.leases.clear()
        self._forget()

    def _forget(self) -> None:
        self.added_bytes = {}
        self.idle_since = None
        self.unloads += 1
        self.state = "unloaded"
        self._close_if_asked()

    def close(self) -> None:
        """Lend it to nobody any more; it is closed as soon as it is not there."""
        self.is_closing = True
        self._close_if_asked()

    def _close_if_asked(self) -> None:
        if self.is_closing and self.state == "unloaded":
            self.state = "closed"

    def status(self, name: str, now: float) -> HostStatus:
        """Describe this moment. Needs no lock: each figure is right, at some moment of the call."""
        idle_since = self.idle_since if self.state == "loaded" else None
        expires = self.expires_at()
        return HostStatus(
            name=name,
            state=self.state,
            leases=len(self.leases),
            loads=self.loads,
            unloads=self.unloads,
            nbytes=self.nbytes,
            idle_s=None if idle_since is None else max(0.0, now - idle_since),
            expires_in_s=None if expires is None else max(0.0, expires - now),
            last_error=self.last_error,
        )

    def holders(self, now: float) -> str:
        """Name who has it, for messages."""
        return "; ".join(
            f"taken at {holder.where}, {now - holder.since:.1f} s ago"
            for holder in list(self.leases.values())
        )


def _without_traceback(error: BaseException) -> BaseException:
    try:
        return copy.copy(error)
    except Exception:
        # A class of the program's own, whose constructor wants something else than its args.
        return TorchUtilsError(shown(error))
