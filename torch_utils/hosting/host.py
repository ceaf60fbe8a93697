"""ModelHost: loads a model on demand, lends it, and unloads it when it is idle."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Literal, TypeVar

from torch_utils._deferral import DeferredSignals
from torch_utils._events import notify
from torch_utils._runtime import ERROR, early_bound, is_finalizing, is_shutting_down, log
from torch_utils.errors import (
    ModelInUseError,
    NoRoomError,
    TorchUtilsError,
    repr_of,
)
from torch_utils.hosting.lease import AsyncLease, Holder, Lease, check_seconds
from torch_utils.hosting.lender import ModelLender
from torch_utils.hosting.process import pickled_load
from torch_utils.hosting.tenant import ProcessTenant, Tenant, ThreadTenant
from torch_utils.oom import clear_exception_frames
from torch_utils.report import CleanupReport
from torch_utils.resource import closed_error, closes_on_error

__all__ = ["HOSTS", "HostStatus", "ModelHost", "Transition", "parse_keep_alive"]

M = TypeVar("M")
State = Literal["unloaded", "loading", "loaded", "unloading", "closed"]
Sizes = Mapping[str, int]

LOAD_AT_EXIT_S, LEASES_AT_EXIT_S = 5.0, 1.0
"""How long the exit callback waits for a load, and for leases of other threads, in seconds."""
LONGEST_WAIT_S = 3600.0
"""The longest single wait in seconds; the system limits it. Longer waits repeat."""


@dataclass(frozen=True)
class HostStatus:
    """The state of a hosted model at one moment.

    Attributes:
        name: The name of the host.
        state: "unloaded", "loading", "loaded", "unloading" or "closed".
        leases: Number of open leases.
        loads: Number of loads.
        unloads: Number of unloads, and of ends of the model's process.
        nbytes: Bytes on the host and all devices: the declared size, or the size of the model's
            tensors and arrays, or the resident memory of its process. 0 if it is not loaded.
        idle_s: Seconds since the last lease ended, or since the load. None if it is lent or not
            loaded.
        expires_in_s: Seconds until an unload unless there is another lease; None if never.
        last_error: A copy of the last load's exception without its traceback, which would keep
            the caller's variables alive. None if that load succeeded.
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


class Transition(Future[Exception | None]):
    """A load or an unload that is under way. Its result is the exception of all waiters.

    Attributes:
        state: "loading" or "unloading".
        thread: The thread that does it; None before that thread has started.
        in_background: Whether the thread does nothing else and the waiters get all its exceptions.
        admitted: Bytes by place that a pool has reserved for the load; None before.
        no_room: Why the load waits for room; empty if it does not.
        error: The exception for the caller that began it, which other waiters may not share.
    """

    def __init__(self, state: State, thread: int | None = None) -> None:
        super().__init__()
        self.state = state
        self.thread = thread
        self.in_background: bool = thread is None
        self.admitted: Sizes | None = None
        self.no_room = ""
        self.error: Exception | None = None
        self.set_running_or_notify_cancel()  # Cancelling a waiter must not cancel it.

    def wait(self, timeout_s: float | None) -> None:
        """Block until it is done or the time is over.

        Unlike `concurrent.futures.wait`, this holds no lock, so a signal handler may use the host.
        """
        woken = threading.Lock()
        woken.acquire()
        with DeferredSignals():
            self.add_done_callback(lambda _: woken.release())
        woken.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))


class ModelHost(ModelLender, Generic[M]):
    """Load a model on demand, lend it to threads and coroutines, and unload it when it is idle.

    ::

        host = ModelHost(load_model, keep_alive="5m")
        with host.lease() as model:
            model.encode(texts)

    Concurrent callers share one load and its exception; the next lease tries again. A lent model
    is never unloaded. The host is closed at exit at the latest. A forked child does not use or
    close its parent's model; it loads its own. While a model is loaded, one daemon thread waits
    for its keep-alive time to pass.

    Args:
        load: Returns the model. Called in the thread that first needs the model.
        name: Its name in messages and metrics; by default the name of ``load``.
        keep_alive: How long to keep an idle model after the last lease: a number of seconds, "90s",
            "10m", "1h", 0 (unload when the last lease ends) or -1 (forever).
        isolation: "thread" keeps the model in this process. "process" gives it a process of its
            own, whose end returns all its memory. The lease is then a proxy of the model (see
            `torch_utils.hosting.process.Proxy`), and ``load`` must be importable.
        call_timeout_s: Seconds that a call of the model may take, with ``isolation="process"``.
            After that the process is killed and the call raises `ModelProcessError`; the next
            lease starts a new process. None for no limit.

    Raises:
        TypeError: ``load`` is not callable, is a coroutine function, or cannot be called in another
            process; or another argument has the wrong type.
        ValueError: ``keep_alive``, ``isolation`` or ``call_timeout_s`` is invalid.
    """

    @closes_on_error
    def __init__(
        self,
        load: Callable[[], M],
        *,
        name: str | None = None,
        keep_alive: float | str = "5m",
        isolation: Literal["thread", "process"] = "thread",
        call_timeout_s: float | None = None,
    ) -> None:
        self._changed = threading.Condition()
        self._reset()
        if not callable(load) or inspect.iscoroutinefunction(load):
            raise TypeError(f"load must be a plain function that returns the model, got {load!r}")
        if isolation not in ("thread", "process"):
            raise ValueError(f'isolation must be "thread" or "process", got {isolation!r}')
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str, got {name!r}")
        check_seconds("call_timeout_s", call_timeout_s)
        if call_timeout_s is not None and (isolation == "thread" or call_timeout_s <= 0):
            raise ValueError(
                'call_timeout_s must be positive, and needs isolation="process", got '
                f"{call_timeout_s!r} with isolation={isolation!r}; a call in a thread cannot be "
                "stopped"
            )
        self.name: str = name or _name_of(load)
        self.isolation = isolation
        self._keep_alive_s = parse_keep_alive(keep_alive)
        self.declared: Sizes | None = None
        self._admit: Callable[..., None] | None = None
        self._new_tenant: Callable[[], Tenant]
        if isolation == "thread":
            self._new_tenant = lambda: ThreadTenant(self.name, load, self.declared)
        else:
            content = pickled_load(load)
            self._new_tenant = lambda: ProcessTenant(
                self.name, content, call_timeout_s, self.declared
            )
        HOSTS[id(self)] = self

    def _reset(self) -> None:
        """Set the state of an unloaded host, in a new one or in a forked child."""
        self._tenant: Tenant | None = None
        self._transition: Transition | None = None
        self._leases: dict[Holder, None] = {}
        self._waiting: set[Holder] = set()
        self._is_closing = False
        self._idle_since = 0.0
        self._was_lent = False  # A keep_alive of 0 keeps a model that was loaded beforehand.
        self._loads = self._unloads = 0
        self._last_error: BaseException | None = None
        self._expiry_thread: threading.Thread | None = None
        # Holders of leases that were garbage-collected; destructors add them at any moment.
        self._dropped: SimpleQueue[Holder | None] = SimpleQueue()

    # Public methods

    def lease(self, timeout_s: float | None = None) -> Lease[M]:
        """Return a context manager that lends the model for a ``with`` block.

        Args:
            timeout_s: Seconds to wait for another thread that loads or unloads the model; None for
                no limit. It does not limit a load in the calling thread.

        Raises:
            TypeError: ``timeout_s`` is not a number. This call raises it; entering the block raises
                the others.
            ValueError: ``timeout_s`` is NaN or too large, likewise.
            TimeoutError: ``timeout_s`` has passed.
            ResourceClosedError: The host is closed.
            TorchUtilsError: The lease was entered before, or this thread is loading or unloading
                the model.
            Exception: ``load`` raised it, in this thread or in the one that this thread waited for.
        """
        return Lease(self, timeout_s, sys._getframe(1))

    def alease(self, timeout_s: float | None = None) -> AsyncLease[M]:
        """Return a context manager that lends the model for an ``async with`` block.

        A thread loads the model while the event loop continues. A cancelled coroutine keeps no
        lease, but the load continues. With ``isolation="process"`` a call of the model blocks; use
        `asyncio.to_thread`.

        Args:
            timeout_s: Seconds to wait, including the load; None for no limit.

        Raises:
            TimeoutError: ``timeout_s`` has passed. `lease` lists the other exceptions.
        """
        return AsyncLease(self, timeout_s, sys._getframe(1))

    def load(self) -> bool:
        """Load the model now, before the first lease.

        Returns:
            True if this call loaded it. False if it was loaded already or by another thread.

        Raises:
            ResourceClosedError: The host is closed.
            Exception: ``load`` raised it, in this thread or in the one that this thread waited for.
        """
        return self.acquire(None, None)[1]

    def unload(self) -> CleanupReport:
        """Unload the model; the next lease loads it again. Wait for a load that is under way.

        Returns:
            The report of the release; an empty one if the model was not loaded.

        Raises:
            ModelInUseError: The model is lent. The message names each lease.
            ResourceClosedError: The host is closed.
        """
        self.ensure_open()
        while True:
            report = self.unload_if(lambda: not self._leases, "asked")
            if report is not None:
                return report
            with self._changed:
                transition = self._transition
                if transition is None and self._tenant is None:
                    return CleanupReport()
                if self._leases or (transition and transition.thread == threading.get_ident()):
                    raise self.in_use()
            if transition is not None:
                transition.wait(None)

    def status(self) -> HostStatus:
        """Return the current state. Never loads the model, and never waits."""
        tenant, now, state = self._tenant, time.monotonic(), self.state
        is_idle = state == "loaded" and not self._leases
        expires = self._expires_at()
        sizes = tenant.sizes() if tenant is not None and state != "unloaded" else {}
        return HostStatus(
            name=self.name,
            state=state,
            leases=len(self._leases),
            loads=self._loads,
            unloads=self._unloads,
            nbytes=sum(sizes.values()),
            idle_s=max(0.0, now - self._idle_since) if is_idle else None,
            expires_in_s=max(0.0, expires - now) if is_idle and expires is not None else None,
            last_error=self._last_error,
        )

    @property
    def state(self) -> State:
        """The state; "unloaded" also if the model's process has ended by itself."""
        tenant, transition = self._tenant, self._transition
        if transition is not None:
            return transition.state
        if tenant is not None and tenant.is_alive():
            return "loaded"
        return "closed" if self._is_closing else "unloaded"

    # Leases

    def acquire(self, holder: Holder | None, timeout_s: float | None) -> tuple[Tenant, bool]:
        """Lend the model to ``holder``; load it in this thread unless another one does.

        Returns:
            The tenant, and whether this call loaded it.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self._lend(holder)
            if isinstance(found, Tenant):
                return found, False
            if found is not None:
                found.wait(None if deadline is None else deadline - time.monotonic())
                self._check_waited(found, timeout_s)
                continue
            transition = Transition("loading", threading.get_ident())
            try:
                if self._begin_load(transition):
                    return self._load(transition, deadline, holder), True
            finally:
                self._settle(transition, None)  # Does nothing unless an interrupt came in between.

    async def aacquire(self, holder: Holder, timeout_s: float | None) -> Tenant:
        """Lend the model to ``holder``; a thread loads it if no other caller does."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self._lend(holder)
            if isinstance(found, Tenant):
                return found
            transition = Transition("loading")
            if found is None:
                try:
                    if not self._begin_load(transition):
                        continue
                    self._load_in_background(transition, deadline)
                except BaseException as error:  # No thread is going to end this load.
                    self._settle(transition, error if isinstance(error, Exception) else None)
                    raise
            waiting = asyncio.wrap_future(found or transition)
            try:
                left = None if deadline is None else max(0, deadline - time.monotonic())
                await asyncio.wait({waiting}, timeout=left)
            finally:
                with contextlib.suppress(RuntimeError):  # The loop is closed.
                    waiting.cancel()  # The transition itself goes on.
            self._check_waited(found or transition, timeout_s)
            if transition.error is not None:
                raise transition.error

    def _lend(self, holder: Holder | None) -> Tenant | Transition | None:
        """Lend the model if it is loaded.

        Returns:
            The tenant; or the transition to wait for; or None if the model must be loaded first.

        Raises:
            ResourceClosedError: The host is closed.
            TorchUtilsError: This thread itself is loading or unloading the model.
        """
        if self._is_lost():
            self.unload_if(self._is_lost, "lost")
        with DeferredSignals(), self._changed:
            # The caller is counted before the state is read: a destructor that runs in the
            # middle of this cannot unload the model.
            if holder is not None:
                self._waiting.add(holder)
            self.ensure_lending()
            tenant, transition = self._tenant, self._transition
            if transition is not None:
                if transition.thread == threading.get_ident():
                    verb = transition.state.replace("ing", "s")
                    raise TorchUtilsError(
                        f"the code that {verb} {self.name} must not lease {self.name}: it would "
                        "wait for itself"
                    )
                return transition
            if tenant is None:
                return None
            if holder is not None:
                self._begin_lease(holder)
        if holder is not None:
            notify("leases")
        return tenant

    def _begin_load(self, transition: Transition) -> bool:
        """Make ``transition`` the current load; return False if no load is needed."""
        with DeferredSignals(), self._changed:
            self.ensure_lending()
            if self._tenant is not None or self._transition is not None:
                return False
            self._transition = transition
            return True

    def _begin_lease(self, holder: Holder) -> None:
        self._leases[holder] = None
        self._waiting.discard(holder)
        self._was_lent = True

    def _is_lost(self) -> bool:
        return self._tenant is not None and not self._tenant.is_alive()

    def ensure_lending(self) -> None:
        """Raise an error if the host no longer lends."""
        if self._is_closing:
            raise closed_error(f"the host of {self.name} is closed; create a new one")

    def _check_waited(self, transition: Transition, timeout_s: float | None) -> None:
        """Raise the exception of a transition, or an error if the time is over."""
        if not transition.done():
            if transition.no_room:
                raise NoRoomError(transition.no_room)
            raise TimeoutError(
                f"{self.name} is still {transition.state} after {timeout_s} s; pass a larger "
                "timeout_s"
            )
        error = transition.result()
        if error is not None:
            raise error

    def end_lease(self, holder: Holder) -> None:
        """End a lease, or the wait for one."""
        with DeferredSignals(), self._changed:
            waited, held = holder in self._waiting, holder in self._leases
            self._waiting.discard(holder)
            self._leases.pop(holder, None)
            if not waited and not held:
                return
            self._was_lent |= waited  # It was loaded for a caller that no longer waits.
            if not self._leases:
                self._idle_since = time.monotonic()
            self._changed.notify_all()
            if waited and self.is_due():
                self.wake_expiry()
        notify("leases")

    def drop_lease(self, holder: Holder) -> None:
        """End a lease from a destructor, which must not block."""
        self._dropped.put(holder)

    def unload_if_due(self) -> None:
        """Unload the model if its keep-alive time is over."""
        if self.is_due():
            self.unload_if(self.is_due, "closed" if self._is_closing else "idle")

    # Loading

    def _load_in_background(self, transition: Transition, deadline: float | None) -> None:
        """Start a thread that loads the model and lends it to no caller."""

        def load() -> None:
            transition.thread = threading.get_ident()
            try:
                self._load(transition, deadline, None)
            except BaseException:  # The waiters for the transition raise it.
                return

        threading.Thread(target=load, name="torch_utils-load", daemon=True).start()

    def _load(
        self, transition: Transition, deadline: float | None, holder: Holder | None
    ) -> Tenant:
        began = time.monotonic()
        tenant = self._new_tenant()
        self.register_in_child()
        try:
            if self._admit is not None:
                self._admit(self, transition, self.declared, deadline)
                began = time.monotonic()
            tenant.load()
            if self._admit is not None:
                self._admit(self, transition, tenant.sizes(), deadline)
            with DeferredSignals():
                with self._changed:
                    self.ensure_lending()
                    if self._transition is not transition:  # Its caller has given up.
                        raise TorchUtilsError(f"the load of {self.name} was interrupted")
                    if holder is not None:
                        self._begin_lease(holder)
                    self._tenant, self._transition = tenant, None
                    self._loads += 1
                    self._idle_since = time.monotonic()
                    self._last_error = None
                    self._changed.notify_all()
                    self._start_expiry()
                # Without the lock, which a signal handler may need.
                transition.set_result(None)
        except BaseException as error:
            if isinstance(error, Exception):
                clear_exception_frames(error)  # They would keep a partly loaded model alive.
            if self._tenant is not tenant:
                tenant.close()
            if self._settle(transition, error):
                notify(
                    "load", model=self.name, outcome="error", duration_s=time.monotonic() - began
                )
            raise
        notify("load", model=self.name, outcome="success", duration_s=time.monotonic() - began)
        return tenant

    def _settle(self, transition: Transition, error: BaseException | None) -> bool:
        """End a failed load. Return whether its exception is an error rather than an interrupt."""
        with DeferredSignals():
            with self._changed:
                if self._transition is not transition:
                    return False
                is_interrupt = error is not None and not isinstance(error, Exception)
                if transition.in_background and is_interrupt:
                    error = TorchUtilsError(f"loading {self.name} raised {error!r}")
                # An interrupt or a lack of room concerns one caller; the others try again.
                shared = error if isinstance(error, Exception) else None
                if shared is not None:
                    self._last_error = _without_traceback(shared)
                self._transition = None
                self._was_lent = False
                self._changed.notify_all()
                transition.error = shared
            transition.set_result(None if isinstance(shared, NoRoomError) else shared)
        return shared is not None

    # Unloading

    def is_idle(self) -> bool:
        """Return whether it is loaded, not lent, and without waiting callers."""
        is_there = self._tenant is not None and self._transition is None
        return is_there and not self._leases and not self._waiting

    def is_due(self) -> bool:
        """Return whether it is idle and its keep-alive time is over."""
        expires = self._expires_at()
        return self.is_idle() and expires is not None and expires <= time.monotonic()

    def _expires_at(self) -> float | None:
        if self._is_closing:
            return self._idle_since
        if self._keep_alive_s is None or (self._keep_alive_s == 0 and not self._was_lent):
            return None
        return self._idle_since + self._keep_alive_s

    def unload_if(self, may: Callable[[], bool], reason: str) -> CleanupReport | None:
        """Unload the model if ``may()`` returns True; None if there was no unload."""
        transition = Transition("unloading", threading.get_ident())
        with DeferredSignals():
            with self._changed:
                self._end_dropped()
                tenant = self._tenant
                if self._transition is not None or tenant is None or not may():
                    return None
                self._transition = transition
            was_alive = tenant.is_alive()
            try:
                tenant.close()
            finally:
                try:
                    self._forget_tenant(transition)
                except BaseException:  # A second Ctrl-C is not deferred.
                    self._forget_tenant(transition)
                    raise
            notify("unload", model=self.name, reason=reason if was_alive else "lost")
        return tenant.report

    def _forget_tenant(self, transition: Transition) -> None:
        with self._changed:
            if self._transition is transition:
                self._leases.clear()  # Leases of an ended process, or at exit.
                self._unloads += self._tenant is not None
                self._tenant = None
                self._was_lent = False
                self.wake_expiry()  # Ends the thread.
                self._transition = None
                self._changed.notify_all()
        if not transition.done():
            transition.set_result(None)

    def wake_expiry(self) -> None:
        """Make the expiry thread check whether the model is due."""
        self._dropped.put(None)

    def _end_dropped(self) -> None:
        for _ in range(self._dropped.qsize()):
            try:
                holder = self._dropped.get_nowait()
            except Empty:
                return
            if holder is None:
                self._dropped.put(None)  # A wake-up for the expiry thread.
            else:
                self.end_lease(holder)

    def _start_expiry(self) -> None:
        if self._expiry_thread is None and not is_shutting_down():
            thread = threading.Thread(
                target=_expire,
                args=(weakref.ref(self), self._dropped),
                name="torch_utils-expiry",
                daemon=True,
            )
            try:
                thread.start()
            except RuntimeError:  # Too many threads. A pool, `unload` or the exit unloads it.
                return
            self._expiry_thread = thread

    def expire(self) -> float | None:
        """Unload the model if it is due; return the seconds until the next check, None to end."""
        self.unload_if_due()
        with self._changed:
            if self._tenant is None:
                self._expiry_thread = None
                return None
            expires = self._expires_at()
            if expires is None or not self.is_idle():
                # It is in use. Leases do not wake the thread, so it checks again later.
                return min(self._keep_alive_s or LONGEST_WAIT_S, LONGEST_WAIT_S)
            return min(max(0.0, expires - time.monotonic()), LONGEST_WAIT_S)

    def in_use(self) -> ModelInUseError:
        """Return an error that names each lease."""
        now = time.monotonic()
        holders = [
            f"taken at {holder.where}, {now - holder.since:.1f} s ago"
            for holder in list(self._leases)
        ]
        leases = f"{len(holders)} open lease{'s' * (len(holders) != 1)}"
        return ModelInUseError(
            f"{self.name} has {leases}: {'; '.join(holders)}; end them first"
            if holders
            else f"{self.name} is {self.state}"
        )

    # Closing

    def stop_lending(self) -> None:
        """Begin to close: open leases continue, but there are no new ones."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _release(self) -> None:
        if is_finalizing():  # Daemon threads have stopped, perhaps while one held the lock.
            self._changed = threading.Condition()
        self.stop_lending()
        began, at_exit = time.monotonic(), is_shutting_down()
        ends = self._close_deadline()
        while self._tenant is not None or self._transition is not None:
            if self.unload_if(lambda: not self._leases, "closed") is not None:
                continue
            with self._changed:
                transition = self._transition
                if transition is None and (self._tenant is None or not self._leases):
                    continue  # The state changed in between.
                threads = self.holder_threads()
                if at_exit:
                    ends = began + (LEASES_AT_EXIT_S if transition is None else LOAD_AT_EXIT_S)
                elif transition is not None and transition.state == "unloading":
                    ends = math.inf  # By another thread, as this one would.
                left = ends - time.monotonic()
                if left > 0 and threads != {threading.get_ident()}:
                    self._changed.wait(min(left, LONGEST_WAIT_S))
                    continue
            if not at_exit or transition is not None:
                raise self.in_use()
            self.unload_if(lambda: True, "closed")

    # Pools and forks

    def join(
        self,
        changed: threading.Condition,
        admit: Callable[..., None],
        declared: Sizes | None,
    ) -> None:
        """Join a pool before the first use: share its lock, and load only what it admits."""
        self._changed, self._admit, self.declared = changed, admit, declared

    def used(self) -> Sizes | None:
        """Return the used or admitted bytes by place; None for an unloaded model."""
        tenant, transition = self._tenant, self._transition
        if tenant is not None:
            return tenant.sizes()
        return None if transition is None else transition.admitted

    def waits_for_room(self) -> bool:
        """Return whether an admitted load needs more room than it was admitted for."""
        transition = self._transition
        return transition is not None and bool(transition.admitted and transition.no_room)

    @property
    def idle_since(self) -> float:
        """When the last lease ended, by `time.monotonic`."""
        return self._idle_since

    def holder_threads(self) -> set[int | None]:
        """Return the threads that hold a lease or are loading or unloading the model."""
        transition = self._transition
        threads = {holder.thread for holder in list(self._leases)}
        return threads if transition is None else {*threads, transition.thread}

    def start_over_in_child(self) -> None:
        """In a forked child: forget the parent's model without running destructors."""
        _OF_PARENTS.append((self._tenant, self._leases, self._dropped))
        self._changed = threading.Condition()
        self._reset()
        self._is_closing = self.closed

    @early_bound
    def __del__(self) -> None:
        leases = self.__dict__.get("_leases")
        if leases is not None:  # A lease refers to its host, so both are garbage.
            leases.clear()
        super().__del__()

    def __repr__(self) -> str:
        return f"<ModelHost {self.name!r}, {self.state}, {len(self._leases)} leases>"


def _expire(find: weakref.ref[ModelHost[Any]], dropped: SimpleQueue[Holder | None]) -> None:
    """Unload the model when its keep-alive time is over, and end dropped leases."""
    while True:
        host = find()
        wait_s: float | None = None
        try:
            wait_s = None if host is None else host.expire()
        except BaseException as error:  # From the model's close(); the model is gone.
            log(ERROR, "unloading an idle model failed: %r", error, exc_info=error)
            wait_s = 0.0
        del host
        if wait_s is None:
            return
        try:
            holder = dropped.get(timeout=wait_s)
        except Empty:
            continue
        host = find()
        if host is not None and holder is not None:
            host.end_lease(holder)
        del host


def _without_traceback(error: BaseException) -> BaseException:
    try:
        return copy.copy(error)
    except Exception:  # The constructor of a class may need other arguments.
        return TorchUtilsError(repr_of(error))


def _name_of(load: Any) -> str:
    while isinstance(load, partial):
        load = load.func
    name = getattr(load, "__qualname__", None) or type(load).__qualname__
    return str(name)


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h)")


def parse_keep_alive(value: object) -> float | None:
    """Return a keep-alive time in seconds, or None for no limit.

    Raises:
        TypeError: It is not a number or a str.
        ValueError: It has none of the forms that `ModelHost` lists.
    """
    use = 'use seconds, "90s", "10m", "1h", 0 to unload after the last lease, or -1 to never unload'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"keep_alive is invalid: {value!r}; {use}")
    if isinstance(value, str):
        text = value.strip()
        if text in ("0", "-1"):
            return None if text == "-1" else 0.0
        if not text or _PART.sub("", text):
            raise ValueError(f"keep_alive is invalid: {value!r}; {use}")
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if value == -1:
        return None
    if value < 0 or not math.isfinite(value):
        raise ValueError(f"keep_alive is invalid: {value!r}; {use}")
    return float(value)


HOSTS: weakref.WeakValueDictionary[int, ModelHost[Any]] = weakref.WeakValueDictionary()
"""All hosts of this process by their ids, including those of pools."""
_OF_PARENTS: list[object] = []


def _after_fork() -> None:
    for host in list(HOSTS.values()):
        if not is_shutting_down():
            host.start_over_in_child()


os.register_at_fork(after_in_child=_after_fork)
