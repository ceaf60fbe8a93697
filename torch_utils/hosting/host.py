"""ModelHost: loads a model on demand, lends it, and lets it sleep or unloads it when it is idle.

The state of a host is its tenant, which is the loaded model, and its transition, which is what one
thread is doing to the tenant:

    unloaded -> loading -> loaded -> sleeping -> asleep -> waking -> loaded
                           loaded or asleep -> unloading -> unloaded, or closed

Both change only under the host's lock, which the hosts of a pool share. Under it, the thread that
sets the transition checks that no other is under way and that no lease forbids it. After that only
this thread touches the tenant, without the lock, until it ends the transition. All others wait for
the transition. A load or wake that fails ends it in the state in which it began; a sleep that is
impossible ends as an unload.

    transition          set in                 by                             ends in
    loading, waking     `_lend`                a lease, `load`, `wake`        `_load`, `_settle`
    sleeping, unloading `unload_if`            `sleep`, `unload`, the expiry  `unload_if`
                                               thread, a pool, `close`

A forked child starts over, unloaded, in `start_over_in_child`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Literal, TypeVar

from torch_utils._oom import clear_exception_frames, is_out_of_memory
from torch_utils._release.counting import Inventory
from torch_utils._report import CleanupReport
from torch_utils._resource import closed_error, closes_on_error
from torch_utils._runtime import ERROR, early_bound, is_shutting_down, log, notify
from torch_utils._signals import DeferredSignals
from torch_utils.errors import ModelInUseError, NoRoomError, TorchUtilsError, repr_of
from torch_utils.hosting.arguments import (
    Devices,
    check_positive,
    check_seconds,
    parse_keep_alive,
    parse_sizes,
)
from torch_utils.hosting.blocks import Blocks, blocks_of, by_device
from torch_utils.hosting.lease import (
    AsyncLease,
    Holder,
    Lease,
    ModelLender,
    call_in_thread,
    in_thread,
)
from torch_utils.hosting.process import ModelProcess, pickled_load
from torch_utils.hosting.tenant import WARNING, Tenant, ThreadTenant

__all__ = ["HostStatus", "ModelHost"]

M = TypeVar("M")
T = TypeVar("T")
State = Literal[
    "unloaded", "loading", "loaded", "sleeping", "asleep", "waking", "unloading", "closed"
]

LOAD_AT_EXIT_S, LEASES_AT_EXIT_S = 5.0, 1.0
"""How long the exit callback waits for a load, and for leases of other threads, in seconds."""
LONGEST_WAIT_S = 3600.0
"""The longest single wait in seconds; the system limits it. Longer waits repeat."""


@dataclass(frozen=True)
class HostStatus:
    """The state of a hosted model at one moment.

    Attributes:
        name: The name of the host.
        state: "unloaded", "loading", "loaded", "sleeping", "asleep", "waking", "unloading" or
            "closed".
        leases: Number of open leases.
        loads: Number of loads.
        unloads: Number of unloads, and of ends of the model's process.
        nbytes: Bytes on the host and all devices: the declared size, or the size of the model's
            tensors and arrays, or the memory of its process. 0 if it is not loaded.
        nbytes_by_device: The same by "host" and device ("cuda:0"). Asleep, it is on the host.
        idle_s: Seconds since the last lease ended, or since the load. None if it is leased or not
            loaded.
        expires_in_s: Seconds until an unload unless there is another lease; None if never.
        last_error: The repr of the last load's exception; None if that load succeeded.
    """

    name: str
    state: State
    leases: int
    loads: int
    unloads: int
    nbytes: int
    nbytes_by_device: Mapping[str, int]
    idle_s: float | None
    expires_in_s: float | None
    last_error: str | None


class Transition(Future[Exception | None]):
    """A load, an unload or the end of a lease. Its result is the exception of all waiters.

    Attributes:
        state: "loading", "waking", "sleeping" or "unloading"; "leased" for the end of a lease.
        thread: The thread that does it; None before that thread has started.
        holder: The holder for which it began.
        in_background: Whether the thread does nothing else and the waiters get all its exceptions.
        admitted: The memory that a pool has reserved for the load; None before.
        is_made: Whether the load has that memory.
        no_room: Why the load waits for room; empty if it does not.
        error: The exception for ``holder``, which other waiters may not share.
    """

    def __init__(self, state: Any, thread: int | None = None, holder: Holder | None = None) -> None:
        super().__init__()
        self.state: Any = state
        self.thread = thread
        self.holder = holder
        self.in_background: bool = thread is None
        self.admitted: Blocks | None = None
        self.is_made = False
        self.no_room = ""
        self.error: Exception | None = None
        self.set_running_or_notify_cancel()  # Cancelling a waiter must not cancel it.

    def wait(self, timeout_s: float | None) -> None:
        """Block until it is done or the time is over."""
        with contextlib.suppress(concurrent.futures.TimeoutError):
            self.exception(timeout_s)


class ModelHost(ModelLender, Generic[M]):
    """Load a model on demand, lend it to threads and coroutines, and unload it when it is idle.

    ::

        host = ModelHost(load_model, keep_alive="5m")
        with host.lease() as model:
            model.encode(texts)

    Concurrent callers share one load and its exception; the next lease tries again. A model is
    never unloaded while it is leased. The host is closed at exit at the latest. A forked child does
    not use or close its parent's model; it loads its own. While a model is loaded, one daemon
    thread waits for its keep-alive time to pass.

    Args:
        load: Returns the model, a new one at each call. Called in the thread that first needs the
            model.
        name: Its name in messages and metrics; by default the name of ``load``.
        keep_alive: How long to keep an idle model after the last lease: a number of seconds, "90s",
            "10m", "1h", 0 (until the last lease ends) or -1 (forever).
        idle: What happens then. "unload" drops the model. "sleep" moves its values to host memory
            and gives back that of the device; the next lease wakes it in a fraction of the time of
            a load. A model that cannot sleep is unloaded; the log says why. See `offload`.
        isolation: "thread" keeps the model in this process. "process" gives it a process of its
            own, whose end returns all its memory. The lease is then a proxy of the model (see
            `torch_utils.hosting.process.Proxy`), and ``load`` must be importable.
        nbytes: The model's bytes on the host, or by "host" and device ("cuda:0"). None to measure
            them.
        max_leases: How many leases there may be at a time. Further ones wait for the end of a
            lease. None for no limit.
        call_timeout_s: Seconds that a call of the model may take, with ``isolation="process"``.
            After that the process is killed and the call raises `ModelProcessError`; the next
            lease starts a new process. None for no limit.
        environment: Environment variables that ``isolation="process"`` adds or changes for the
            model's process, such as ``CUDA_VISIBLE_DEVICES``.

    Raises:
        TypeError: ``load`` is not callable, is a coroutine function, or cannot be called in another
            process; or another argument has the wrong type.
        ValueError: An argument has an invalid value, or needs ``isolation="process"``.
    """

    @closes_on_error
    def __init__(
        self,
        load: Callable[[], M],
        *,
        name: str | None = None,
        keep_alive: float | str = "5m",
        idle: Literal["unload", "sleep"] = "unload",
        isolation: Literal["thread", "process"] = "thread",
        nbytes: Devices | None = None,
        max_leases: int | None = None,
        call_timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._changed = threading.Condition()
        self._reset()
        is_model = callable(getattr(type(load), "forward", None))  # An nn.Module is callable.
        if not callable(load) or is_model or inspect.iscoroutinefunction(load):
            raise TypeError(f"load must be a plain function that returns the model, got {load!r}")
        if idle not in ("unload", "sleep"):
            raise ValueError(f'idle must be "unload" or "sleep", got {idle!r}')
        if isolation not in ("thread", "process"):
            raise ValueError(f'isolation must be "thread" or "process", got {isolation!r}')
        if max_leases is not None:
            check_positive("max_leases", max_leases)
        if call_timeout_s is not None:
            check_seconds("call_timeout_s", call_timeout_s)
        if isolation == "thread" and not (call_timeout_s is None and environment is None):
            raise ValueError('call_timeout_s and environment need isolation="process"')
        self.name: str = name or _name_of(load)
        self.isolation = isolation
        self._max_leases = max_leases
        self._keep_alive_s = parse_keep_alive(keep_alive)
        self._sleeps = idle == "sleep"
        self.declared = None if nbytes is None else parse_sizes("nbytes", nbytes, "host")
        self._admit: Callable[..., None] | None = None
        self._make_room: Callable[[ModelHost[M]], bool] = lambda host: False
        self._needs_size = self._has_warned = False
        self._new_tenant: Callable[[], Tenant]
        if isolation == "thread":
            self._new_tenant = partial(ThreadTenant, self.name, load)
        else:
            arguments = pickled_load(load), self.name, environment, call_timeout_s
            self._new_tenant = partial(ModelProcess, *arguments)
        HOSTS[id(self)] = self

    def _reset(self) -> None:
        """Set the state of an unloaded host, in a new one or in a forked child."""
        self._tenant: Tenant | None = None
        self._transition: Transition | None = None
        self._leases: dict[Holder, None] = {}
        self._abandoned: set[Holder] = set()  # leases whose last call still runs in the process
        self._waiting: set[Holder] = set()
        self._lease_end: Transition | None = None  # for which callers wait
        self._is_closing = False
        self.idle_since = 0.0  # by `time.monotonic`
        self._was_leased = False  # A keep_alive of 0 keeps a model that was loaded beforehand.
        self._loads = self._unloads = 0
        self._last: Blocks = {}  # the memory of the last load
        self._remains: list[Inventory] = []  # of unloaded models, parts of which are in use
        self._last_error: str | None = None
        self._expiry_thread: threading.Thread | None = None
        # Holders of leases that were garbage-collected: their destructors must not block.
        self.dropped: SimpleQueue[Holder | None] = SimpleQueue()

    # Public methods

    def lease(self, timeout_s: float | None = None) -> Lease[M]:
        """Return a context manager that lends the model for a ``with`` block.

        Args:
            timeout_s: Seconds to wait for another thread that loads or unloads the model, for the
                end of other leases (``max_leases``), and for the model's process. None for no
                limit. It does not limit a load in the calling thread.

        Raises:
            TypeError: ``timeout_s`` is not a number. This call raises it; entering the block raises
                the others.
            ValueError: ``timeout_s`` is negative or not finite, likewise.
            TimeoutError: ``timeout_s`` has passed.
            ResourceClosedError: The host is closed.
            TorchUtilsError: The lease was entered before, this thread is loading or unloading the
                model, or ``load`` returned a model that was released.
            Exception: ``load`` raised it, in this thread or in the one that this thread waited for.
        """
        return Lease(self, timeout_s, sys._getframe(1))

    def alease(self, timeout_s: float | None = None) -> AsyncLease[M]:
        """Return a context manager that lends the model for an ``async with`` block.

        A thread loads the model while the event loop continues. A cancelled coroutine keeps no
        lease, but the load continues, and so does a call that runs in the model's process: new
        leases wait until it has returned.

        Args:
            timeout_s: Seconds to wait, including the load; None for no limit.

        Raises:
            TimeoutError: ``timeout_s`` has passed. `lease` lists the other exceptions.
        """
        return AsyncLease(self, timeout_s, sys._getframe(1))

    def call(
        self, function: Callable[[M], T], *, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, T]:
        """Lease the model, and call ``function(model)`` in a new thread.

        ::

            vectors = await host.call(lambda model: model.encode(texts), timeout_s=30)

        A caller that is cancelled before the function began keeps no lease, as with `alease`. Later
        the answer is dropped: the model stays leased until the function has returned, and its
        process continues.

        Args:
            function: The function. It runs in a thread of its own.
            timeout_s: As for `alease`. It does not limit the function.

        Returns:
            A coroutine that returns what the function returns.

        Raises:
            Exception: The function or `lease` raised it.
        """
        return call_in_thread(AsyncLease(self, timeout_s, sys._getframe(1)), function)

    def load(self) -> bool:
        """Load the model now, before the first lease.

        Returns:
            True if this call loaded it. False if it was loaded already or by another thread.

        Raises:
            ResourceClosedError: The host is closed.
            Exception: ``load`` raised it, in this thread or in the one that this thread waited for.
        """
        return self.acquire(None, None)[1]

    def wake(self) -> bool:
        """Wake the model if it is asleep, before the next lease.

        Returns:
            True if this call woke it.

        Raises:
            NoRoomError: Its devices have too little memory. It is still asleep, as a whole.
            ResourceClosedError: The host is closed.
        """
        self.ensure_open()
        return self.state == "asleep" and self.load()

    def sleep(self) -> bool:
        """Move the model to host memory; the next lease wakes it. Wait for a load under way.

        Returns:
            True if this call did it. False if the model was not loaded or was asleep, or if it
            cannot sleep and was unloaded instead; the log then says why.

        Raises:
            ModelInUseError: The model is leased. The message names each lease.
            ResourceClosedError: The host is closed.
        """
        report = self._leave(sleeps=True)
        return report is not None and self.state == "asleep"

    def unload(self) -> CleanupReport:
        """Unload the model; the next lease loads it again. Wait for a load that is under way.

        Returns:
            The report of the release; an empty one if the model was not loaded. Its ``errors`` say
            if the model could only be dropped.

        Raises:
            ModelInUseError: The model is leased. The message names each lease.
            ResourceClosedError: The host is closed.
        """
        return self._leave(sleeps=False) or CleanupReport()

    def _leave(self, sleeps: bool) -> CleanupReport | None:
        self.ensure_open()
        while True:
            report = self.unload_if(lambda: not self._leases, "requested", sleeps)
            if report is not None:
                return report
            with self._changed:
                transition, tenant = self._transition, self._tenant
                if transition is None and (tenant is None or (sleeps and tenant.is_asleep)):
                    return None
                if self._leases or (transition and transition.thread == threading.get_ident()):
                    raise self.in_use()
            if transition is not None:
                transition.wait(None)

    def status(self) -> HostStatus:
        """Return the current state. Never loads the model, and never waits."""
        tenant, now, state = self._tenant, time.monotonic(), self.state
        is_idle = state == "loaded" and not self._leases
        expires = self._expires_at()
        sizes = {}
        if tenant is not None and state != "unloaded":
            self.measure()
            sizes = by_device(self._blocks(tenant))
        return HostStatus(
            name=self.name,
            state=state,
            leases=len(self._leases),
            loads=self._loads,
            unloads=self._unloads,
            nbytes=sum(sizes.values()),
            nbytes_by_device=sizes,
            idle_s=max(0.0, now - self.idle_since) if is_idle else None,
            expires_in_s=max(0.0, expires - now) if is_idle and expires is not None else None,
            last_error=self._last_error,
        )

    @property
    def state(self) -> State:
        """The state; "unloaded" also if the model's process has ended by itself."""
        tenant, transition = self._tenant, self._transition
        if transition is not None:
            return transition.state  # type: ignore[no-any-return]
        if tenant is not None and tenant.is_alive():
            return "asleep" if tenant.is_asleep else "loaded"
        return "closed" if self._is_closing else "unloaded"

    # Leases

    def acquire(self, holder: Holder | None, timeout_s: float | None) -> tuple[Tenant, bool]:
        """Lend the model to ``holder``; load it in this thread unless another one does.

        A process is started in the background if the wait is limited.

        Returns:
            The tenant, and whether this call loaded it.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        in_background = deadline is not None and self.isolation == "process"
        while True:
            found = self._try(holder, deadline, in_background)
            if not isinstance(found, Transition):
                return found
            found.wait(_seconds_until(deadline))
            self._check_waited(found, holder, timeout_s)

    async def aacquire(self, holder: Holder, timeout_s: float | None) -> Tenant:
        """Lend the model to ``holder``; a thread loads it if no other caller does."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self._try(holder, deadline, in_background=True)
            if not isinstance(found, Transition):
                return found[0]
            waiting = asyncio.wrap_future(found)
            try:
                await asyncio.wait({waiting}, timeout=_seconds_until(deadline))
            finally:
                with contextlib.suppress(RuntimeError):  # The loop is closed.
                    waiting.cancel()  # The transition itself goes on.
            self._check_waited(found, holder, timeout_s)

    def _try(
        self, holder: Holder | None, deadline: float | None, in_background: bool
    ) -> tuple[Tenant, bool] | Transition:
        """Lend the model, load it, or return the transition to wait for."""
        thread = None if in_background else threading.get_ident()
        own = Transition("loading", thread, holder)
        try:
            found = self._lend(holder, own)
            if found is not own:
                return found if isinstance(found, Transition) else (found, False)
            if not in_background:
                return self._load(own, deadline, holder), True
            in_thread(partial(self._load, own, deadline, None))
            return own
        except BaseException:  # An interrupt may have come before the load.
            self._settle(own, None)
            raise

    def _lend(self, holder: Holder | None, load: Transition) -> Tenant | Transition:
        """Lend the model if it is loaded.

        Returns:
            The tenant, or the transition to wait for: ``load`` if the caller must load the model.

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
                    verb = transition.state.removesuffix("ing")
                    raise TorchUtilsError(
                        f"cannot lease {self.name} from its own {verb} function: it would deadlock"
                    )
                return transition
            if tenant is None or tenant.is_asleep:
                load.state = "loading" if tenant is None else "waking"
                self._transition = load
                return load
            if holder is not None:
                is_full = self._max_leases is not None and len(self._leases) >= self._max_leases
                if is_full or self._abandoned:
                    self._lease_end = self._lease_end or Transition("leased")
                    return self._lease_end
                self._begin_lease(holder)
            return tenant

    def _begin_lease(self, holder: Holder) -> None:
        self._leases[holder] = None
        self._waiting.discard(holder)
        self._was_leased = True

    def _is_lost(self) -> bool:
        return self._tenant is not None and not self._tenant.is_alive()

    def ensure_lending(self) -> None:
        """Raise an error if the host no longer lends."""
        if self._is_closing:
            raise closed_error(f"{self.name} is closed; create a new host or pool")

    def _check_waited(
        self, transition: Transition, holder: Holder | None, timeout_s: float | None
    ) -> None:
        """Raise the exception of a transition, or an error if the time is over."""
        if not transition.done():
            if transition.no_room:
                raise NoRoomError(transition.no_room)
            still = f"{self.name} is still {transition.state}"
            raise TimeoutError(f"{still} after {timeout_s} s; pass a larger timeout_s")
        is_own = holder is not None and transition.holder is holder
        error = transition.error if is_own else transition.result()
        if error is not None:
            raise error

    def abandon(self, holder: Holder) -> None:
        """Let new leases wait for the end of a lease, whose last call runs in the process."""
        with DeferredSignals(), self._changed:
            if holder in self._leases:
                self._abandoned.add(holder)

    def end_lease(self, holder: Holder) -> None:
        """End a lease, or the wait for one."""
        with DeferredSignals(), self._changed:
            waited, held = holder in self._waiting, holder in self._leases
            self._waiting.discard(holder)
            self._abandoned.discard(holder)
            self._leases.pop(holder, None)
            if not waited and not held:
                return
            self._was_leased |= waited  # It was loaded for a caller that no longer waits.
            if not self._leases:
                self.idle_since = time.monotonic()
            self._wake_waiters()
            if waited and self.is_due():
                self.wake_expiry()

    def _wake_waiters(self) -> None:
        self._changed.notify_all()
        lease_end, self._lease_end = self._lease_end, None
        if lease_end is not None:
            lease_end.set_result(None)

    def unload_if_due(self) -> None:
        """Unload the model if its keep-alive time is over."""
        if self.is_due():
            reason = "closed" if self._is_closing else "idle"
            self.unload_if(self.is_due, reason, self._sleeps and not self._is_closing)

    # Loading

    def _load(
        self, transition: Transition, deadline: float | None, holder: Holder | None
    ) -> Tenant:
        transition.thread = threading.get_ident()
        tenant, began, outcome = self._tenant or self._new_tenant(), time.monotonic(), "error"
        wakes = tenant.is_asleep
        self.register_in_child()
        try:
            if self._admit is not None:
                expected = tenant.blocks_awake() if wakes else self._expected()
                self._admit(self, transition, self._declared_blocks() or expected, deadline)
                began = time.monotonic()
            self._make(tenant)
            if not wakes:
                self._warn_if_unknown(tenant)
                self._last = self._blocks(tenant)
                if self._admit is not None:
                    self._admit(self, transition, self._last, deadline)
            with DeferredSignals():
                with self._changed:
                    self.ensure_lending()
                    if self._transition is not transition:  # Its caller has given up.
                        raise TorchUtilsError(f"the load of {self.name} was interrupted")
                    if holder is not None:
                        self._begin_lease(holder)
                    self._tenant, self._transition = tenant, None
                    self._loads += not wakes
                    self.idle_since = time.monotonic()
                    self._last_error = None
                    self._changed.notify_all()
                    self._start_expiry()
                # Without the lock, which a signal handler may need.
                transition.set_result(None)
            outcome = "success"
            return tenant
        except BaseException as error:
            if isinstance(error, Exception):
                clear_exception_frames(error)  # They would keep a partly loaded model alive.
            try:
                if self._tenant is not tenant:
                    tenant.close()
            finally:
                if not self._settle(transition, error):
                    outcome = ""
            raise
        finally:
            if outcome and not wakes:
                duration_s = time.monotonic() - began
                notify("load", model=self.name, outcome=outcome, duration_s=duration_s)

    def _make(self, tenant: Tenant) -> None:
        """Load or wake the model; if memory runs out, let the pool make room, and try once more."""
        wakes = tenant.is_asleep
        make = tenant.wake if wakes else tenant.load
        try:
            make()
            return
        except Exception as error:
            if not is_out_of_memory(error) or not (self._make_room(self) or wakes):
                raise
            clear_exception_frames(error)
        try:
            make()
        except Exception as error:
            if not (wakes and is_out_of_memory(error)):
                raise
            clear_exception_frames(error)
            raise NoRoomError(f"no room to wake {self.name}; it is still asleep: {error}") from None

    def measure(self) -> None:
        """Measure the model again, which may have grown or moved, unless it is in a transition."""
        tenant = self._tenant
        if tenant is not None and self._transition is None:
            tenant.measure()

    def _blocks(self, tenant: Tenant) -> Blocks:
        return (
            self._declared_blocks() if self.declared and not tenant.is_asleep else tenant.blocks()
        )

    def _expected(self) -> Blocks:
        """Return the memory of the last load; what of it still exists will be shared."""
        alive = self.remains()
        return {
            key if key in alive else (self.name, key): block for key, block in self._last.items()
        }

    def _declared_blocks(self) -> Blocks:
        return blocks_of(self.name, self.declared or {})

    def _warn_if_unknown(self, tenant: Tenant) -> None:
        """Log once if the model is not measured, and a pool or the unload needs to know it."""
        is_known = bool(self._blocks(tenant)) or isinstance(tenant, ModelProcess)
        needs_size = self._needs_size or not hasattr(type(tenant.model), "close")
        if needs_size and not is_known and not self._has_warned:
            self._has_warned = True
            what = "%s holds no tensors or arrays that can be counted; declare nbytes="
            if not hasattr(type(tenant.model), "close"):
                what += ", and let its load function return an object with close()"
            log(WARNING, what, self.name)

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
                    self._last_error = repr_of(shared)
                self._transition = None
                self._was_leased = False
                self._changed.notify_all()
                transition.error = shared
            transition.set_result(None if isinstance(shared, NoRoomError) else shared)
        return shared is not None

    # Unloading

    def is_idle(self) -> bool:
        """Return whether it is loaded and awake, not leased, and without waiting callers."""
        is_awake = self._tenant is not None and not self._tenant.is_asleep
        return is_awake and self._transition is None and not self._leases and not self._waiting

    def is_asleep(self) -> bool:
        """Return whether it is asleep, and without waiting callers."""
        is_asleep = self._tenant is not None and self._tenant.is_asleep
        return is_asleep and self._transition is None and not self._waiting

    def is_due(self) -> bool:
        """Return whether it is idle and its keep-alive time is over."""
        expires = self._expires_at()
        return self.is_idle() and expires is not None and expires <= time.monotonic()

    def _expires_at(self) -> float | None:
        if self._is_closing:
            return self.idle_since
        if self._keep_alive_s is None or (self._keep_alive_s == 0 and not self._was_leased):
            return None
        return self.idle_since + self._keep_alive_s

    def unload_if(
        self, may: Callable[[], bool], reason: str, sleeps: bool = False
    ) -> CleanupReport | None:
        """Unload the model if ``may()`` returns True; None if there was no unload.

        Args:
            may: Called under the lock.
            reason: Why, for metrics.
            sleeps: Whether it is to sleep instead, if it can.
        """
        transition = Transition("sleeping" if sleeps else "unloading", threading.get_ident())
        with DeferredSignals():
            with self._changed:
                tenant = self._tenant
                if self._transition is not None or tenant is None or not may():
                    return None
                if sleeps and tenant.is_asleep:
                    return None
                self._transition = transition
            was_alive = tenant.is_alive()
            is_asleep = False
            try:
                is_asleep = sleeps and was_alive and self._sleep(tenant)
                if not is_asleep:
                    tenant.close()
            finally:
                with self._changed:
                    self._transition = None
                    self._was_leased = False
                    if not is_asleep:
                        self._leases.clear()  # Leases of an ended process, or at exit.
                        self._abandoned.clear()
                        self._unloads += 1
                        self._tenant = None
                        if isinstance(tenant, ThreadTenant):
                            self._remains.append(tenant.inventory)
                            self.remains()
                    self._wake_waiters()
                    self.wake_expiry()  # Ends the thread.
                transition.set_result(None)
            if not is_asleep:
                notify("unload", model=self.name, reason=reason if was_alive else "lost")
        return tenant.report

    def _sleep(self, tenant: Tenant) -> bool:
        """Let the model sleep, or log why it cannot."""
        try:
            reason = tenant.sleep()
        except Exception as error:
            # The process has ended, or its pipe is broken.
            reason = repr_of(error)
        if reason:
            log(WARNING, "%s cannot sleep and is unloaded instead: %s", self.name, reason)
        return not reason

    def wake_expiry(self) -> None:
        """Make the expiry thread check whether the model is due."""
        self.dropped.put(None)

    def _start_expiry(self) -> None:
        if self._expiry_thread is None and not is_shutting_down():
            # Nothing is due earlier. A thread that looked at once might close a model of a pool
            # before newer ones.
            first_s = min(self._keep_alive_s or LONGEST_WAIT_S, LONGEST_WAIT_S)
            args = (weakref.ref(self), self.dropped, first_s)
            thread = threading.Thread(None, _expire, "torch_utils-expiry", args, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # Too many threads. A pool, `unload` or the exit unloads it.
                return
            self._expiry_thread = thread

    def expire(self) -> float | None:
        """Unload the model if it is due; return the seconds until the next check, None to end."""
        self.unload_if_due()
        with self._changed:
            if self._tenant is None or self._tenant.is_asleep:
                self._expiry_thread = None
                return None
            expires, wait_s = self._expires_at(), self._keep_alive_s or LONGEST_WAIT_S
            if expires is not None and self.is_idle():
                wait_s = max(0.0, expires - time.monotonic())
            return min(wait_s, LONGEST_WAIT_S)  # Leases do not wake the thread.

    def in_use(self) -> ModelInUseError:
        """Return an error that names each lease."""
        now, leases = time.monotonic(), list(self._leases)
        if not leases:
            return ModelInUseError(f"{self.name} is {self.state}")
        taken = "; ".join(f"taken at {h.where}, {now - h.since:.1f} s ago" for h in leases)
        count = f"{len(leases)} open lease{'s' * (len(leases) > 1)}"
        return ModelInUseError(f"{self.name} has {count}: {taken}; end them first")

    # Closing

    def stop_lending(self) -> None:
        """Begin to close: open leases continue, but there are no new ones."""
        with self._changed:
            self._is_closing = True
            self._wake_waiters()

    def _release(self) -> None:
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
                if at_exit:
                    ends = began + (LEASES_AT_EXIT_S if transition is None else LOAD_AT_EXIT_S)
                elif transition is not None and transition.state in ("sleeping", "unloading"):
                    ends = math.inf  # By another thread, as this one would.
                left = ends - time.monotonic()
                if left > 0 and self.holder_threads() != {threading.get_ident()}:
                    self._changed.wait(min(left, LONGEST_WAIT_S))
                    continue
            if at_exit and transition is not None and transition.state in ("loading", "waking"):
                return  # The thread or process that loads ends with the program.
            if not at_exit or transition is not None:
                raise self.in_use()
            self.unload_if(lambda: True, "closed")

    # Pools and forks

    def join(
        self, changed: threading.Condition, admit: Any, make_room: Any, needs_size: bool
    ) -> None:
        """Join a pool before the first use: share its lock, and load only what it admits."""
        self._changed, self._admit, self._make_room = changed, admit, make_room
        self._needs_size = needs_size

    def used(self) -> Blocks | None:
        """Return the used or admitted memory; None for a model that is neither there nor loading.

        A model that waits for room has both: the pieces that exist count once.
        """
        tenant, transition = self._tenant, self._transition
        admitted = None if transition is None else transition.admitted
        if tenant is None:
            return admitted
        return {**self._blocks(tenant), **(admitted or {})}

    def remains(self) -> Blocks:
        """Return the memory of unloaded models that callers still use."""
        self._remains = [one for one in self._remains if one.blocks()]
        return {key: block for one in self._remains for key, block in one.blocks().items()}

    def pending(self) -> Blocks:
        """Return the memory that a load under way was admitted for and does not have yet."""
        transition = self._transition
        if transition is None or transition.is_made:
            return {}
        return transition.admitted or {}

    def waits_for_room(self) -> bool:
        """Return whether an admitted load needs more room than it was admitted for."""
        transition = self._transition
        return transition is not None and bool(transition.admitted and transition.no_room)

    def holder_threads(self) -> set[int | None]:
        """Return the threads that hold a lease or are loading or unloading the model.

        None stands for the process, where the last call of an abandoned lease runs.
        """
        transition = self._transition
        threads = {None if h in self._abandoned else h.thread for h in list(self._leases)}
        return threads if transition is None else {*threads, transition.thread}

    def start_over_in_child(self) -> None:
        """In a forked child: forget the parent's model without running destructors."""
        _OF_PARENTS.append((self._tenant, self._leases, self.dropped))
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


def _expire(
    find: weakref.ref[ModelHost[Any]], dropped: SimpleQueue[Holder | None], wait_s: float | None
) -> None:
    """Unload the model when its keep-alive time is over, and end dropped leases."""
    while wait_s is not None:
        holder = None
        with contextlib.suppress(Empty):
            holder = dropped.get(timeout=wait_s)
        host = find()
        if host is None:
            return
        try:
            if holder is not None:
                host.end_lease(holder)
            wait_s = host.expire()
        except BaseException as error:  # From the model's close(); the model is gone.
            log(ERROR, "unloading an idle model failed: %r", error, exc_info=error)
            wait_s = 0.0
        del host


def _seconds_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _name_of(load: Any) -> str:
    while isinstance(load, partial):
        load = load.func
    name = getattr(load, "__qualname__", None) or type(load).__qualname__
    return str(name)


HOSTS: weakref.WeakValueDictionary[int, ModelHost[Any]] = weakref.WeakValueDictionary()
"""All hosts of this process by their ids, including those of pools."""
_OF_PARENTS: list[object] = []


def _after_fork() -> None:
    for host in list(HOSTS.values()):
        if not is_shutting_down():
            host.start_over_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
