"""ModelHost: a model that is loaded when it is needed, lent, and unloaded when it is idle."""

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
from torch_utils._events import tell
from torch_utils._runtime import ERROR, early_bound, is_finalizing, is_shutting_down, log
from torch_utils.errors import (
    ModelInUseError,
    NoRoomError,
    TorchUtilsError,
    shown,
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
"""How long the end of the program waits for a load, and for leases of other threads."""
LONGEST_WAIT_S = 3600.0
"""After which a wait looks again; the system limits the length of one wait."""


@dataclass(frozen=True)
class HostStatus:
    """The state of a hosted model at one moment.

    Attributes:
        name: The name of its host.
        state: "unloaded", "loading", "loaded", "unloading" or "closed".
        leases: How many leases are open.
        loads: How many times it was loaded.
        unloads: How many times it was unloaded, or its process ended.
        nbytes: Bytes that it takes, on the host and on devices together: the declared size, or
            else those of its tensors and arrays; of a model in a process of its own, the resident
            memory of that process. 0 while it is not loaded.
        idle_s: Seconds since the last lease ended, or since it was loaded; None while it is lent
            or not loaded.
        expires_in_s: Seconds until it is unloaded if nobody leases it; None if it will not be.
        last_error: A copy of the exception of the last load, without its traceback, which would
            keep the caller's variables alive; None if that load succeeded.
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
    """A load or an unload that is under way. The result is the error that all waiters share.

    Attributes:
        state: "loading" or "unloading".
        thread: The thread that does it; None before that thread has started.
        in_background: Whether that thread does nothing else, so that all errors are the waiters'.
        admitted: Bytes by place that a pool has reserved for the load; None before.
        no_room: Why the load waits for room; empty if it does not.
        error: The error of the caller that began it, which not all waiters share.
    """

    def __init__(self, state: State, thread: int | None = None) -> None:
        super().__init__()
        self.state = state
        self.thread = thread
        self.in_background: bool = thread is None
        self.admitted: Sizes | None = None
        self.no_room = ""
        self.error: Exception | None = None
        self.set_running_or_notify_cancel()  # A waiter that is cancelled does not cancel it.

    def wait(self, timeout_s: float | None) -> None:
        """Wait in a thread until it is done, or the time is over.

        A signal handler that runs meanwhile may use the host: no lock is held, unlike in
        `concurrent.futures.wait`.
        """
        woken = threading.Lock()
        woken.acquire()
        with DeferredSignals():
            self.add_done_callback(lambda _: woken.release())
        woken.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))


class ModelHost(ModelLender, Generic[M]):
    """Loads a model when it is first needed, lends it, and unloads it when it is idle.

    ::

        host = ModelHost(load_model, keep_alive="5m")
        with host.lease() as model:
            model.encode(texts)

    The model is loaded once however many threads and coroutines ask for it. All who wait for a
    load get its error; the next lease tries again. The model is never unloaded under a lease. The
    host is closed at exit at the latest. In a forked child it is not loaded: the child neither
    uses nor closes its parent's model, and may load one of its own.

    While a model is loaded, one daemon thread waits for its `keep_alive` to pass.

    Args:
        load: Returns the model. Called in the thread that first needs it.
        name: Its name in messages and metrics; by default the function's.
        keep_alive: How long an idle model is kept: seconds, "90s", "10m", "1h", 0 (unload when
            the last lease ends) or -1 (for ever). Counts from the end of the last lease.
        isolation: "thread" for a model in this process. "process" for a model in a process of its
            own, whose end gives all its memory back. A lease is then a proxy for it (see
            `torch_utils.hosting.process.Proxy`), and ``load`` must be importable.
        call_timeout_s: With ``isolation="process"``: seconds that a call of the model may take.
            The process of a call that takes longer is killed, and the call raises
            `ModelProcessError`; the next lease starts a new process. None: no limit.

    Raises:
        TypeError: ``load`` cannot be called, or not from another process, or is a coroutine
            function; or another argument has the wrong type.
        ValueError: ``keep_alive``, ``isolation`` or ``call_timeout_s`` is not a valid value.
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
            raise TypeError(f"load must be a function that returns the model, not {load!r}")
        if isolation not in ("thread", "process"):
            raise ValueError(f'isolation must be "thread" or "process", not {isolation!r}')
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a str, not {name!r}")
        check_seconds("call_timeout_s", call_timeout_s)
        if call_timeout_s is not None and (isolation == "thread" or call_timeout_s <= 0):
            raise ValueError(
                'call_timeout_s must be positive, and needs isolation="process": a call in a '
                f"thread cannot be ended (got {call_timeout_s!r}, isolation={isolation!r})"
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
        """Be a host that is not loaded: a new one, or that of a forked child."""
        self._tenant: Tenant | None = None
        self._transition: Transition | None = None
        self._leases: dict[Holder, None] = {}
        self._waiting: set[Holder] = set()
        self._is_closing = False
        self._idle_since = 0.0
        self._was_lent = False  # A keep_alive of 0 keeps what was loaded beforehand.
        self._loads = self._unloads = 0
        self._last_error: BaseException | None = None
        self._expiry_thread: threading.Thread | None = None
        # Of leases that were dropped. A destructor can put something into it at any moment.
        self._dropped: SimpleQueue[Holder | None] = SimpleQueue()

    # The public calls

    def lease(self, timeout_s: float | None = None) -> Lease[M]:
        """Return a context manager that lends the model for the length of a ``with`` block.

        Args:
            timeout_s: Seconds to wait for another thread that loads or unloads the model. A load
                in the calling thread takes as long as it takes.

        Raises:
            TypeError, ValueError: ``timeout_s`` is not a number of seconds. At once; the others on
                entering the block.
            TimeoutError: ``timeout_s`` has passed.
            ResourceClosedError: The host is closed.
            TorchUtilsError: The lease was entered before, or this thread itself is loading or
                unloading the model.
            Exception: What ``load`` raised, in this thread or in the one that it waited for.
        """
        return Lease(self, timeout_s, sys._getframe(1))

    def alease(self, timeout_s: float | None = None) -> AsyncLease[M]:
        """Return a context manager that lends the model for an ``async with`` block.

        The model is loaded in a thread, and the event loop goes on. A coroutine that is cancelled
        leaves no lease behind; the load goes on. With ``isolation="process"`` a call of the model
        still blocks: make it by `asyncio.to_thread`.

        Args:
            timeout_s: Seconds to wait, for the load too.

        Raises:
            TimeoutError: ``timeout_s`` has passed. The others are those of `lease`.
        """
        return AsyncLease(self, timeout_s, sys._getframe(1))

    def load(self) -> bool:
        """Load the model now rather than with the first lease.

        Returns:
            True if this call loaded it, False if it was loaded, or another thread loaded it.

        Raises:
            ResourceClosedError: The host is closed.
            Exception: What ``load`` raised, in this thread or in the one that it waited for.
        """
        return self.acquire(None, None)[1]

    def unload(self) -> CleanupReport:
        """Unload the model; the next lease loads it again. Waits for a load that is under way.

        Returns:
            What was freed; nothing if the model was not loaded.

        Raises:
            ModelInUseError: It is lent. Says where the leases were taken.
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
        """Return the state at this moment. Loads nothing and waits for nothing."""
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
        """The state; "unloaded" also where the model's process has ended by itself."""
        tenant, transition = self._tenant, self._transition
        if transition is not None:
            return transition.state
        if tenant is not None and tenant.is_alive():
            return "loaded"
        return "closed" if self._is_closing else "unloaded"

    # Leases

    def acquire(self, holder: Holder | None, timeout_s: float | None) -> tuple[Tenant, bool]:
        """Lend the model to ``holder``, loading it in this thread if nobody else does.

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
                        f"the code that {verb} {self.name} asks for a lease of {self.name} and "
                        "would wait for itself; do not lease the model there"
                    )
                return transition
            if tenant is None:
                return None
            if holder is not None:
                self._begin_lease(holder)
        if holder is not None:
            tell("leases")
        return tenant

    def _begin_load(self, transition: Transition) -> bool:
        """Make ``transition`` the load that is under way; False if the model needs none now."""
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
        """Raise unless a lease can be had."""
        if self._is_closing:
            raise closed_error(f"the host of {self.name} is closed")

    def _check_waited(self, transition: Transition, timeout_s: float | None) -> None:
        """Raise what a wait for a transition has to raise: its error, or that time is over."""
        if not transition.done():
            if transition.no_room:
                raise NoRoomError(transition.no_room)
            raise TimeoutError(f"{self.name} is still {transition.state} after {timeout_s} s")
        error = transition.result()
        if error is not None:
            raise error

    def end_lease(self, holder: Holder) -> None:
        """Note that a lease has ended, or that nobody waits for it any more."""
        with DeferredSignals(), self._changed:
            waited, held = holder in self._waiting, holder in self._leases
            self._waiting.discard(holder)
            self._leases.pop(holder, None)
            if not waited and not held:
                return
            self._was_lent |= waited  # It was loaded for a caller that has gone.
            if not self._leases:
                self._idle_since = time.monotonic()
            self._changed.notify_all()
            if waited and self.is_due():
                self.wake_expiry()
        tell("leases")

    def drop_lease(self, holder: Holder) -> None:
        """Note from a destructor, which must not wait, that a lease has ended."""
        self._dropped.put(holder)

    def unload_if_due(self) -> None:
        """Unload an idle model whose time is over."""
        if self.is_due():
            self.unload_if(self.is_due, "closed" if self._is_closing else "idle")

    # Loading

    def _load_in_background(self, transition: Transition, deadline: float | None) -> None:
        """Load the model in a thread that ends with the load, and lend it to nobody yet."""

        def load() -> None:
            transition.thread = threading.get_ident()
            try:
                self._load(transition, deadline, None)
            except BaseException:
                return  # The callers that wait for the transition raise it.

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
                    if self._transition is not transition:  # Given up by who began it.
                        raise TorchUtilsError(f"the load of {self.name} was interrupted")
                    if holder is not None:
                        self._begin_lease(holder)
                    self._tenant, self._transition = tenant, None
                    self._loads += 1
                    self._idle_since = time.monotonic()
                    self._last_error = None
                    self._changed.notify_all()
                    self._start_expiry()
                # Not under the lock: a signal handler may need it in the middle of a wait.
                transition.set_result(None)
        except BaseException as error:
            if isinstance(error, Exception):
                clear_exception_frames(error)  # What it had loaded must not live on in them.
            if self._tenant is not tenant:
                tenant.close()
            if self._settle(transition, error):
                tell("load", model=self.name, outcome="error", duration_s=time.monotonic() - began)
            raise
        tell("load", model=self.name, outcome="success", duration_s=time.monotonic() - began)
        return tenant

    def _settle(self, transition: Transition, error: BaseException | None) -> bool:
        """End a load that failed; return False if an interrupt ended it, or if it has ended."""
        with DeferredSignals():
            with self._changed:
                if self._transition is not transition:
                    return False
                is_interrupt = error is not None and not isinstance(error, Exception)
                if transition.in_background and is_interrupt:
                    error = TorchUtilsError(f"loading {self.name} raised {error!r}")
                # An interrupt, or no room in time, concerns one caller; the others try again.
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
        """Whether it is loaded, and nobody has it or waits for it."""
        is_there = self._tenant is not None and self._transition is None
        return is_there and not self._leases and not self._waiting

    def is_due(self) -> bool:
        """Whether it is idle and its time is over."""
        expires = self._expires_at()
        return self.is_idle() and expires is not None and expires <= time.monotonic()

    def _expires_at(self) -> float | None:
        if self._is_closing:
            return self._idle_since
        if self._keep_alive_s is None or (self._keep_alive_s == 0 and not self._was_lent):
            return None
        return self._idle_since + self._keep_alive_s

    def unload_if(self, may: Callable[[], bool], reason: str) -> CleanupReport | None:
        """Unload the model if ``may()`` says so; None if not, or if it is not loaded."""
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
                except BaseException:  # A second Ctrl-C, which is delivered at once.
                    self._forget_tenant(transition)
                    raise
            tell("unload", model=self.name, reason=reason if was_alive else "lost")
        return tenant.report

    def _forget_tenant(self, transition: Transition) -> None:
        with self._changed:
            if self._transition is transition:
                self._leases.clear()  # Of a process that has ended, or at the end of the program.
                self._unloads += self._tenant is not None
                self._tenant = None
                self._was_lent = False
                self.wake_expiry()  # The thread then ends.
                self._transition = None
                self._changed.notify_all()
        if not transition.done():
            transition.set_result(None)

    def wake_expiry(self) -> None:
        """Have the expiry thread look whether the model is due."""
        self._dropped.put(None)

    def _end_dropped(self) -> None:
        for _ in range(self._dropped.qsize()):
            try:
                holder = self._dropped.get_nowait()
            except Empty:
                return
            if holder is None:
                self._dropped.put(None)  # It is for the expiry thread.
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
            except RuntimeError:  # Out of threads: a pool, `unload` or the exit unloads it.
                return
            self._expiry_thread = thread

    def expire(self) -> float | None:
        """Unload the model if it is due; return the seconds until it may be, None to end."""
        self.unload_if_due()
        with self._changed:
            if self._tenant is None:
                self._expiry_thread = None
                return None
            expires = self._expires_at()
            if expires is None or not self.is_idle():
                # It is in use, and checked again after the keep_alive: no lease wakes the thread.
                return min(self._keep_alive_s or LONGEST_WAIT_S, LONGEST_WAIT_S)
            return min(max(0.0, expires - time.monotonic()), LONGEST_WAIT_S)

    def in_use(self) -> ModelInUseError:
        """Return the error that says where the leases were taken."""
        now = time.monotonic()
        holders = [
            f"taken at {holder.where}, {now - holder.since:.1f} s ago"
            for holder in list(self._leases)
        ]
        times = f"{len(holders)} time{'s' * (len(holders) != 1)}"
        return ModelInUseError(
            f"{self.name} is lent {times}: {'; '.join(holders)}"
            if holders
            else f"{self.name} is {self.state}"
        )

    # The end

    def stop_lending(self) -> None:
        """Begin to close: leases stay, and nothing more is lent."""
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
                    continue  # It changed in between.
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

    # For a pool, and for forks

    def join(
        self,
        changed: threading.Condition,
        admit: Callable[..., None],
        declared: Sizes | None,
    ) -> None:
        """Share a pool's lock, and load only what it admits. Before the host is first used."""
        self._changed, self._admit, self.declared = changed, admit, declared

    def used(self) -> Sizes | None:
        """Return the bytes by place that it takes, or is admitted to take; None for nothing."""
        tenant, transition = self._tenant, self._transition
        if tenant is not None:
            return tenant.sizes()
        return None if transition is None else transition.admitted

    def waits_for_room(self) -> bool:
        """Return whether it is loaded, but for the room that it lacks."""
        transition = self._transition
        return transition is not None and bool(transition.admitted and transition.no_room)

    @property
    def idle_since(self) -> float:
        """When the last lease ended, by `time.monotonic`."""
        return self._idle_since

    def holder_threads(self) -> set[int | None]:
        """Return the threads that have leases, or that are loading or unloading it."""
        transition = self._transition
        threads = {holder.thread for holder in list(self._leases)}
        return threads if transition is None else {*threads, transition.thread}

    def start_over_in_child(self) -> None:
        """In a forked child: forget the parent's model without running its destructors."""
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
    """Unload an idle model when its time is over, and end leases that were dropped."""
    while True:
        host = find()
        wait_s: float | None = None
        try:
            wait_s = None if host is None else host.expire()
        except BaseException as error:  # Out of the model's close(): the model is gone.
            log(ERROR, "unloading an idle model: %r", error, exc_info=error)
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
    except Exception:  # A class of the program's own, whose constructor wants other arguments.
        return TorchUtilsError(shown(error))


def _name_of(load: Any) -> str:
    while isinstance(load, partial):
        load = load.func
    name = getattr(load, "__qualname__", None) or type(load).__qualname__
    return str(name)


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|h)")


def parse_keep_alive(value: object) -> float | None:
    """Return the seconds, or None for ever.

    Raises:
        TypeError: It is neither a number nor a str.
        ValueError: It is not one of the forms that `ModelHost` names.
    """
    use = 'use seconds, "90s", "10m", "1h", 0 to unload when the last lease ends, or -1 for never'
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"keep_alive cannot be {value!r}; {use}")
    if isinstance(value, str):
        text = value.strip()
        if text in ("0", "-1"):
            return None if text == "-1" else 0.0
        if not text or _PART.sub("", text):
            raise ValueError(f"keep_alive cannot be {value!r}; {use}")
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if value == -1:
        return None
    if value < 0 or not math.isfinite(value):
        raise ValueError(f"keep_alive cannot be {value!r}; {use}")
    return float(value)


HOSTS: weakref.WeakValueDictionary[int, ModelHost[Any]] = weakref.WeakValueDictionary()
"""All hosts of this process by their ids, those of pools too."""
_OF_PARENTS: list[object] = []


def _after_fork() -> None:
    for host in list(HOSTS.values()):
        if not is_shutting_down():
            host.start_over_in_child()


os.register_at_fork(after_in_child=_after_fork)
