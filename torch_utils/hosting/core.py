"""Core: one hosted model under many threads; what takes time, and so happens without the lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch_utils._deferral import DeferredSignals
from torch_utils._events import tell
from torch_utils._runtime import is_shutting_down
from torch_utils.errors import ModelInUseError, TorchUtilsError
from torch_utils.hosting.attempt import Attempt
from torch_utils.hosting.lending import Lending, closed_error
from torch_utils.hosting.tenancy import Holder
from torch_utils.hosting.tenants import Tenant
from torch_utils.hosting.waiting import ThreadWaiter
from torch_utils.oom import clear_exception_frames
from torch_utils.report import CleanupReport

__all__ = ["Core"]

LOAD_AT_EXIT_S = 5.0
"""How long the end of the program waits for a load that is under way."""
LEASES_AT_EXIT_S = 1.0
"""How long it waits for leases of other threads."""


class Core(Lending):
    """One model: lent, loaded, unloaded and closed. `Tenancy` says what may happen when."""

    # Loading

    def load(
        self, attempt: Attempt, number: int = 0, holder: Holder | None = None
    ) -> Tenant | None:
        """Load the model in this thread, and lend it to ``holder``.

        Returns:
            None if somebody else has begun to load meanwhile.

        Raises:
            Exception: What the load raised.
        """
        tenant: Tenant | None = None
        try:
            try:
                # Claimed in here, so that an interrupt at any moment finds its way to `_give_up`.
                if not self._claim(attempt, threading.get_ident()):
                    return None
                if self.limits is not None:
                    self.limits.make_room(self, attempt)
                attempt.loading_since = self._clock()
                tenant = self._load()
                if self.limits is not None:
                    self.limits.check_room(self, attempt, tenant)
                self._succeeded(attempt, tenant, number, holder)
            except BaseException as error:
                self._give_up(attempt, tenant, error)
                raise
        finally:
            self._give_up(attempt, tenant, None)
        return tenant

    def load_now(self) -> bool:
        """Load the model unless it is there, or wait for who does; True if this call loaded it."""
        self.refuse_inside()
        while True:
            waiter = ThreadWaiter()
            with self._lock:
                self.ensure_open()
                state, attempt = self.tenancy.state, self._attempt
                if state == "loaded" and self.tenant is not None:
                    if self.tenant.is_alive():
                        return False
                    self._lose(self.tenant)
                    state = "unloaded"
                if state != "unloaded":
                    self.refuse_own_work("a load")
                    self._waiters.append(waiter.wake)
            if state == "unloaded":
                if self.load(Attempt()) is not None:
                    return True
                continue
            waiter.wait(None)
            if attempt.error is not None:
                raise attempt.error

    def load_in_background(self, attempt: Attempt, *_: object) -> None:
        """Load the model in a thread, which is there for that long only; lends it to nobody."""
        is_started = False
        attempt.is_apart = True
        try:
            if not self._claim(attempt, -1):
                return
            thread = threading.Thread(
                target=self._load_quietly, args=(attempt,), name="torch_utils-load", daemon=True
            )
            try:
                if is_shutting_down():
                    raise RuntimeError("no thread can be started any more")
                thread.start()
            except RuntimeError:
                self._load_quietly(attempt)
            is_started = True
        finally:
            if not is_started:
                self._give_up(attempt, None, None)

    def _load_quietly(self, attempt: Attempt) -> None:
        try:
            self.load(attempt)
        except BaseException:
            # Those who wait for the attempt raise it, and the status tells everybody else.
            return

    def _claim(self, attempt: Attempt, thread: int) -> bool:
        with self._lock:
            attempt.is_begun = True
            attempt.thread = thread
            if self._attempt is attempt:
                return not attempt.is_finished
            if self.tenancy.state != "unloaded":
                return False
            self.ensure_open()
            self._attempt = attempt
            self.tenancy.start_loading()
        return True

    def _succeeded(
        self, attempt: Attempt, tenant: Tenant, number: int, holder: Holder | None
    ) -> None:
        with self._lock:
            if self.tenancy.is_closing:
                raise closed_error(f"the host of {self.name} was closed while it loaded")
            self.tenant = tenant
            self.tenancy.loaded(tenant.added_bytes, self._clock())
            attempt.is_finished = True
            if holder is not None:
                self.tenancy.lend(number, holder)
                self._tell_leases()
            self._await_expiry()
            self._notify()
        self._tell_load(attempt, "success")

    def _tell_load(self, attempt: Attempt, outcome: str) -> None:
        duration_s = self._clock() - attempt.loading_since
        tell("load", model=self.name, outcome=outcome, duration_s=duration_s)

    def _give_up(
        self, attempt: Attempt, tenant: Tenant | None, error: BaseException | None
    ) -> None:
        """Let the others go on after a load that failed. Nothing, if it did not."""
        if attempt.is_finished or self._attempt is not attempt:
            return
        if attempt.is_apart and error is not None and not isinstance(error, Exception):
            error = TorchUtilsError(f"what loads {self.name} raised {error!r}")
        if isinstance(error, Exception):
            clear_exception_frames(error)  # What it had loaded so far must not live on in them.
        if tenant is not None and self.tenancy.state == "loading":
            self.tenant = None
            tenant.close()
        with self._lock:
            if attempt.is_finished:
                return
            # An interrupt is its thread's alone; those who wait try it themselves.
            attempt.error = error if isinstance(error, Exception) else None
            if self.tenancy.state == "loading":
                self.tenancy.load_failed(attempt.error)
            attempt.is_finished = True
            self._await_expiry()
            self._notify()
        if attempt.error is not None and attempt.loading_since:
            self._tell_load(attempt, "error")

    # Unloading

    def expire(self) -> None:
        """Unload an idle model whose time is over. Called by the timer, perhaps too early."""
        with self._lock:
            self._settle()
            self._called_at = None
            if not self.is_due():
                self._await_expiry()
        self.unload_if_due()

    def expire_now(self) -> None:
        """Unload what is due, and be done with it when this returns."""
        if self.is_inside():
            return  # The timer does it.
        if self.is_due():
            self.unload_if_due()
        while self.tenancy.state == "unloading" and self.tenancy.keep_alive_s == 0:
            waiter = ThreadWaiter()
            with self._lock:
                if self.tenancy.state != "unloading" or self.is_own_work():
                    return
                self._waiters.append(waiter.wake)
            waiter.wait(None)

    def unload_if_due(self) -> CleanupReport | None:
        """Unload it if it is idle and its time is over; None if not."""
        return self._take_out(self.is_due, "closed" if self.tenancy.is_closing else "idle")

    def unload_if_idle(self) -> CleanupReport | None:
        """Unload it if nobody has it and nobody waits for it; None if not."""
        return self._take_out(self.tenancy.can_make_room, "room")

    def unload(self) -> CleanupReport:
        """Unload it, after a load or unload that is under way; nothing, if it is not loaded.

        Raises:
            ModelInUseError: It is lent. Says to whom.
        """
        self.refuse_inside()
        while True:
            waiter = ThreadWaiter()
            with self._lock:
                self._settle()
                if self.tenancy.state in ("unloaded", "closed"):
                    return CleanupReport()
                if self.tenancy.leases or self.is_own_work():
                    raise self.in_use()
                waits = self.tenancy.state != "loaded"
                if waits:
                    self._waiters.append(waiter.wake)
            if waits:
                waiter.wait(None)
            else:
                report = self._take_out(self.tenancy.can_unload, "asked")
                if report is not None:
                    return report

    def _take_out(
        self, may: Callable[[], bool], reason: str, *, forced: bool = False
    ) -> CleanupReport | None:
        with DeferredSignals():
            with self._lock:
                self._settle()
                if not may() or self.tenant is None:
                    return None
                tenant = self.tenant
                self._timer.cancel(self.expire)
                self._called_at = None
                if forced:
                    self.tenancy.leases.clear()
                    self._tell_leases()
                if not tenant.is_alive():
                    reason = "lost"  # Nobody has asked for it since its process ended.
                self._unloader = threading.get_ident()
                self.tenancy.start_unloading()
            self._finish_unloading(tenant, reason)
        return tenant.report

    def _finish_unloading(self, tenant: Tenant, reason: str) -> None:
        try:
            tenant.close()
        finally:
            with self._lock:
                was_there = self.tenancy.state == "unloading"
                if was_there:
                    self.tenancy.unloaded()
                self._settle()  # What a handler asked the timer for may have been cancelled.
                self._notify()
                self.tenant = None
            if was_there:
                tell("unload", model=self.name, reason=reason)

    def in_use(self) -> ModelInUseError:
        """Make the error that says who has it."""
        holders = self.tenancy.holders(self._clock())
        count = len(self.tenancy.leases)
        return ModelInUseError(
            f"{self.name} is lent {count} time{'s' * (count != 1)}: {holders}"
            if count
            else f"{self.name} is {self.tenancy.state}"
        )

    # The end

    def lend_no_more(self) -> None:
        """Begin to close: what is lent stays so, and what is idle waits for `shut`."""
        if self.is_inside():  # A signal handler; what it has interrupted has to end first.
            self._is_to_close = True
            self._timer.call_soon(self.expire)
            self.refuse_inside()
        with self._lock:
            self.tenancy.close()
            self._notify()

    def shut(self, deadline_s: float) -> None:
        """Lend nothing more, wait for the leases that are open, and unload.

        When the program ends it is unloaded in any case. Otherwise, if the deadline passes, the
        end of the last lease unloads it.

        Raises:
            ModelInUseError: The deadline passed. Says where the leases were taken.
        """
        self.lend_no_more()
        at_exit = is_shutting_down()
        began = time.monotonic()
        while True:
            waiter = ThreadWaiter()
            with self._lock:
                self._settle()
                state = self.tenancy.state
                mine = threading.get_ident()
                others = [h for h in self.tenancy.leases.values() if h.thread != mine]
                if state == "closed":
                    return
                if at_exit:
                    allowed_s = LOAD_AT_EXIT_S if state != "loaded" else LEASES_AT_EXIT_S
                else:
                    allowed_s = deadline_s
                if state == "loaded" and (self.tenancy.can_unload() or (at_exit and not others)):
                    left = None
                else:
                    is_hopeless = (state == "loaded" and not others) or self.is_own_work()
                    left = 0.0 if is_hopeless else began + allowed_s - time.monotonic()
                    self._waiters.append(waiter.wake)
            if left is not None and left > 0:
                waiter.wait(left)
            elif left is None or (at_exit and state == "loaded"):
                self._take_out(lambda: self.tenancy.state == "loaded", "closed", forced=at_exit)
            else:
                raise self.in_use()
