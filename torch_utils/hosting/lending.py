"""Lending: who has a model, who waits for it, and when it expires; the quick half of `Core`.

There is one lock, held for moments: never while something is loaded, given back or waited for.
A lease may also be ended by a destructor, at any allocation of any thread, which must not wait for
a lock: it puts down the lease's number, and the timer's thread sees to it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

from torch_utils._events import tell
from torch_utils._runtime import is_shutting_down
from torch_utils.errors import ModelInUseError, ResourceClosedError, TorchUtilsError
from torch_utils.hosting.attempt import Attempt, Limits
from torch_utils.hosting.tenancy import Holder, HostStatus, Tenancy
from torch_utils.hosting.tenants import Tenant
from torch_utils.hosting.timer import TIMER, Timer

__all__ = ["Lending", "closed_error"]

_SECTIONS = (__name__, "torch_utils.hosting.core")  # The modules that take a host's lock.


class Lending:
    """One model, of which leases are lent.

    Args:
        name: What messages call it.
        load: Loads it.
        keep_alive_s: See `Tenancy`.
        clock: Seconds that only grow.
        timer: Calls when an idle model expires.
        limits: What it shares with other hosts.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], Tenant],
        keep_alive_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        timer: Timer = TIMER,
        limits: Limits | None = None,
    ) -> None:
        self.name = name
        self.pid = os.getpid()
        self.tenancy = Tenancy(keep_alive_s)
        self.tenant: Tenant | None = None
        self.limits = limits
        self._load = load
        self._clock = clock
        self._timer = timer
        self._called_at: float | None = None  # when the timer will call
        self._attempt = Attempt()
        self._unloader = 0  # the thread that unloads it
        self._waiters: list[Callable[[], None]] = []
        self._ended: deque[int] = deque()
        self._is_to_close = False
        # Reentrant: a signal handler or a destructor may ask in the middle of what its thread is
        # doing here, and is told so. Used by ``with`` alone, which no interrupt can leave without
        # letting go of it.
        self._lock = threading.RLock()

    def status(self) -> HostStatus:
        """Describe this moment; takes no lock, changes nothing."""
        return self.tenancy.status(self.name, self._clock())

    # Leases

    def ask(self, number: int, holder: Holder, wake: Callable[[], None]) -> Tenant | Attempt:
        """Get a lease, or else what to wait for, or to do.

        Returns:
            The tenant, which is lent. Or an attempt that nobody has begun: the caller is to load.
            Or one that somebody has: ``wake`` is called, once, when something changes.

        Raises:
            ResourceClosedError: The host is closed, or about to be.
            ModelInUseError: This thread is in the middle of lending it, or of returning it.
            TorchUtilsError: This thread is in the middle of loading or unloading it.
        """
        self.refuse_inside()
        with self._lock:
            self._settle()
            self.ensure_open()
            tenant = self.tenant
            if tenant is not None and self.tenancy.state == "loaded":
                if tenant.is_alive():
                    self.tenancy.lend(number, holder)
                    self._tell_leases()
                    return tenant
                self._lose(tenant)
            if self.tenancy.state == "unloaded":
                return Attempt()
            self.refuse_own_work("a lease")
            self._waiters.append(wake)
            return self._attempt

    def want(self, number: int) -> None:
        """Keep an idle model from expiring while somebody waits for this lease of it."""
        self.tenancy.wanted.add(number)

    def no_longer_want(self, number: int) -> None:
        """Take that back; `end_lease` does so too."""
        with self._lock:
            self.tenancy.no_longer_wanted(number, self._clock())

    def ensure_open(self) -> None:
        """Raise if no lease can be had any more."""
        if self.tenancy.is_closing:
            raise closed_error(f"the host of {self.name} is closed")

    def drop_lease(self, number: int) -> None:
        """Note that a lease has ended, in a destructor: the timer sees to what is due then."""
        self._ended.append(number)
        self._timer.call_soon(self.expire)

    def end_lease(self, number: int) -> None:
        """Note that a lease has ended, or that nobody waits for it any more.

        What is due then is unloaded by `expire_now`, which the caller calls.
        """
        if self.is_inside():
            self.drop_lease(number)
            return
        self._ended.append(number)
        with self._lock:
            self._settle()
            if not self.is_due():
                self._await_expiry()

    def _settle(self) -> None:
        """Strike out the leases that have ended, and close what could not be closed before."""
        if self._is_to_close:
            self.tenancy.close()
            self._is_to_close = False
            self._notify()
        while self._ended:
            gave_up = self.tenancy.no_longer_wanted(self._ended[0], self._clock())
            if self.tenancy.give_back(self._ended[0], self._clock()) or gave_up:
                self._notify()
                self._tell_leases()
            self._ended.popleft()

    def wake_at_change(self, wake: Callable[[], None]) -> None:
        """Have somebody woken, once, when a lease ends or the model has come or gone."""
        with self._lock:
            self._settle()
            self._waiters.append(wake)

    def is_at(self, attempt: Attempt | None) -> bool:
        """Say whether this is the try that is under way."""
        return self._attempt is attempt and self.tenancy.state == "loading"

    def is_inside(self) -> bool:
        """Say whether this thread is in the middle of changing what is known of the model."""
        if not self._lock._is_owned():  # type: ignore[attr-defined]
            return False
        # Who asks comes first, then the one whose question it is, and then what he interrupted.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") in _SECTIONS:
            frame = frame.f_back
        while frame is not None and frame.f_globals.get("__name__") not in _SECTIONS:
            frame = frame.f_back
        return frame is not None

    def refuse_inside(self) -> None:
        """Raise in a signal handler or destructor that could neither wait nor change anything."""
        if self.is_inside():
            raise ModelInUseError(
                f"a signal handler or destructor asks for {self.name} while its own thread is in "
                "the middle of lending or returning it; try again"
            )

    def is_own_work(self) -> bool:
        """Say whether this very thread loads or unloads it, and would wait for itself for ever.

        What loads a model may ask for it; so may a signal handler, in the middle of that.
        """
        state = self.tenancy.state
        worker = {"loading": self._attempt.thread, "unloading": self._unloader}.get(state)
        return worker == threading.get_ident()

    def refuse_own_work(self, what: str) -> None:
        """Raise if this very thread would have to wait for itself."""
        if self.is_own_work():
            verb = self.tenancy.state.replace("ing", "s")
            raise TorchUtilsError(f"what {verb} {self.name} asks for {what} of {self.name}")

    def _tell_leases(self) -> None:
        tell("leases", model=self.name, leases=len(self.tenancy.leases))

    def _lose(self, tenant: Tenant) -> None:
        self.tenant = None
        self.tenancy.lost()
        tell("unload", model=self.name, reason="lost")
        tenant.close()  # It has ended: this only collects what is left of it.

    def _notify(self) -> None:
        while self._waiters:
            self._waiters[-1]()
            self._waiters.pop()

    def _await_expiry(self) -> None:
        """Have the timer call when the model expires, if it does not so anyway."""
        when = self.tenancy.expires_at()
        if when is not None and (self._called_at is None or when < self._called_at):
            self._called_at = when
            self._timer.call_at(when, self.expire)

    def is_due(self) -> bool:
        """Say whether it would be unloaded now."""
        when = self.tenancy.expires_at()
        return when is not None and when <= self._clock()

    def expire(self) -> None:
        """Unload an idle model whose time is over. Called by the timer, perhaps too early."""
        raise NotImplementedError


def closed_error(message: str) -> BaseException:
    """Make the error for a host that lends nothing any more."""
    if is_shutting_down() and threading.current_thread().daemon:
        return SystemExit(message)  # It ends the thread without a traceback.
    return ResourceClosedError(message)
