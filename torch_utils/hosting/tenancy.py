"""The states of a hosted model: which there are, who may change them, and its memory.

The state of a host is its tenant, which is the loaded model, and its transition, which is what one
thread is doing to the tenant:

    unloaded -> loading -> loaded -> sleeping -> asleep -> waking -> loaded
                           loaded or asleep -> unloading -> unloaded, or closed

Only `Tenancy` changes them, under one lock, which the hosts of a pool share:

    method    called by                                     from                 to
    lend      a lease, `load`, `wake`                       unloaded, asleep     loading, waking
    arrive    the thread that loads                         loading, waking      loaded
    fail      the thread that loads                         loading, waking      unloaded, asleep
    depart    `sleep`, `unload`, `close`, expiry, a pool    loaded, asleep       sleeping, unloading
    leave     the thread that departs                       sleeping, unloading  asleep, unloaded

From `lend` to `arrive` or `fail`, and from `depart` to `leave`, one thread has the tenant for
itself and uses it without the lock; all others wait for its transition. `depart` refuses if the
caller's condition does not hold under the lock, for example if there is a lease. A sleep that is
impossible leaves as an unload. A forked child starts over, unloaded.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from torch_utils._release.storages import Storages
from torch_utils._resource import closed_error
from torch_utils._signals import DeferredSignals
from torch_utils.errors import ModelInUseError, NoRoomError, TorchUtilsError, repr_of
from torch_utils.hosting.blocks import Blocks, blocks_of
from torch_utils.hosting.tenant import Tenant

__all__ = ["Changed", "Holder", "HostStatus", "State", "Tenancy", "Transition"]

State = Literal[
    "unloaded", "loading", "loaded", "sleeping", "asleep", "waking", "unloading", "closed"
]


@dataclass(eq=False)
class Holder:
    """A thread or coroutine that holds a lease or waits for one.

    Attributes:
        where: The line of the program that requested the lease, and its thread.
        thread: The thread; None for a coroutine or a generator, whose thread also runs others.
        since: The time of the request, by `time.monotonic`.
    """

    where: str
    thread: int | None
    since: float


@dataclass(frozen=True)
class HostStatus:
    """The state of a hosted model at one moment.

    Attributes:
        name: The name of the host.
        state: "unloaded", "loading", "loaded", "sleeping", "asleep", "waking", "unloading" or
            "closed".
        leases: Number of open leases.
        loads: Number of loads.
        unloads: Number of unloads, of ends of the model's process, and of releases by the program.
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


class Transition(Future[None]):
    """A load, a wake, a sleep or an unload; or the end of a lease, for which others wait.

    Its exception is that of all who wait for it.

    Attributes:
        state: The state of the host meanwhile; "leased" for the end of a lease.
        thread: The thread that does it; None before that thread has started.
        in_background: Whether the thread does it for all who wait, and not for itself.
        admitted: The memory that a pool has reserved for the load; None before.
        is_made: Whether the load has that memory.
        no_room: Why the load waits for room; empty if it does not.
    """

    def __init__(self, state: Any, in_background: bool = False) -> None:
        super().__init__()
        self.state: Any = state
        self.thread: int | None = None if in_background else threading.get_ident()
        self.in_background = in_background
        self.admitted: Blocks | None = None
        self.is_made = False
        self.no_room = ""
        self.set_running_or_notify_cancel()  # Cancelling a waiter must not cancel it.


class Changed(threading.Condition):
    """A condition whose lock is held without garbage collections.

    They would run destructors of the program, which may wait for a thread that waits for this lock.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._collects = False

    def __enter__(self) -> bool:
        is_held = super().__enter__()
        self._depth += 1
        if self._depth == 1:
            self._collects = gc.isenabled()
            gc.disable()
        return is_held

    def __exit__(self, *exception: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._collects:
            gc.enable()
        super().__exit__(*exception)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait without the lock, as `threading.Condition.wait` does."""
        depth, self._depth = self._depth, 0
        if self._collects:
            gc.enable()
        is_notified = super().wait(timeout)
        self._depth, self._collects = depth, gc.isenabled()
        gc.disable()
        return is_notified


class Tenancy:
    """The tenant of a host, its transition, its leases and its memory.

    Args:
        name: The name of the host.
        keep_alive_s: How long an idle model stays loaded.
        max_leases: How many leases there may be at a time; None for no limit.
        sizes: The declared size of the model, by device; empty to measure it.

    Attributes:
        changed: The lock and the condition of all changes.
        tenant: The loaded model.
        transition: What is being done to it.
        leases: The holders of leases, in order.
        waiting: The holders that wait for a lease. For them the model stays loaded.
        is_closing: Whether there are no new leases.
        idle_since: When the last lease ended, or the load, by `time.monotonic`.
        last_error: The repr of the last load's exception; None if it succeeded.
        last_blocks: The memory of the last load, or before the last sleep.
        unloaded: Unloaded models, parts of which may be in use.
    """

    def __init__(
        self,
        name: str,
        keep_alive_s: float,
        max_leases: int | None,
        sizes: dict[str, int],
    ) -> None:
        self.name = name
        self.keep_alive_s = keep_alive_s
        self.max_leases = max_leases
        self._declared = blocks_of(name, sizes)
        self.changed: Changed = Changed()
        self.start_over(is_closing=False)

    def start_over(self, is_closing: bool) -> None:
        """Set the state of an unloaded host, in a new one or in a forked child."""
        # In place, for all hosts of a pool: a thread of the parent may hold the lock.
        Changed.__init__(self.changed)
        self.tenant: Tenant | None = None
        self.transition: Transition | None = None
        self.leases: dict[Holder, None] = {}
        self.waiting: set[Holder] = set()
        self.is_closing: bool = is_closing
        self.idle_since: float = 0.0
        self._expires_at = math.inf
        self._lease_end: Transition | None = None
        self.loads: int = 0
        self.unloads: int = 0
        self.last_error: str | None = None
        self.last_blocks: Blocks = {}
        self.unloaded: list[Storages] = []

    # What the state is

    @property
    def state(self) -> State:
        """The state; "unloaded" also if the model is lost; see `is_lost`."""
        tenant, transition = self.tenant, self.transition
        if transition is not None:
            return transition.state  # type: ignore[no-any-return]
        if tenant is not None and tenant.is_alive():
            return "asleep" if tenant.is_asleep else "loaded"
        return "closed" if self.is_closing else "unloaded"

    def is_lost(self) -> bool:
        """Return whether the model's process has ended, or the program has released the model."""
        return self.tenant is not None and not self.tenant.is_alive()

    def is_queued(self) -> bool:
        """Return whether a load waits for room in the pool, which others may use for any time."""
        load = None if self.is_closing else self.transition
        return load is not None and load.state in ("loading", "waking") and load.admitted is None

    def is_idle(self, is_asleep: bool = False) -> bool:
        """Return whether it is awake, or asleep, not leased, and without waiting callers."""
        tenant = self.tenant
        is_free = not (self.transition or self.leases or self.waiting)
        return is_free and tenant is not None and tenant.is_asleep == is_asleep

    def is_asleep(self) -> bool:
        """Return whether it is asleep, and without waiting callers."""
        return self.is_idle(is_asleep=True)

    def is_due(self) -> bool:
        """Return whether it is idle and its keep-alive time is over."""
        return self.is_idle() and self.expires_at() <= time.monotonic()

    def expires_at(self) -> float:
        """Return when an idle model is due, by `time.monotonic`."""
        return self.idle_since if self.is_closing else self._expires_at

    def threads(self) -> set[int | None]:
        """Return the threads that hold a lease or do a transition.

        None stands for one that is not known, or that may change.
        """
        transition = self.transition
        threads = {holder.thread for holder in list(self.leases)}
        return threads if transition is None else {*threads, transition.thread}

    def in_use(self) -> ModelInUseError:
        """Return an error that names each lease."""
        now, leases = time.monotonic(), list(self.leases)
        if not leases:
            return ModelInUseError(f"{self.name} is {self.state}")
        taken = "; ".join(f"taken at {h.where}, {now - h.since:.1f} s ago" for h in leases)
        count = f"{len(leases)} open lease{'s' * (len(leases) > 1)}"
        return ModelInUseError(f"{self.name} has {count}: {taken}; end them first")

    def ensure_lending(self) -> None:
        """Raise an error if the host no longer lends."""
        if self.is_closing:
            raise closed_error(f"{self.name} is closed; create a new host, or add it to its pool")

    # Its memory

    def measure(self) -> None:
        """Measure the model again, which may have grown or moved, unless it is in a transition."""
        tenant = self.tenant
        if tenant is not None and self.transition is None:
            tenant.measure()

    def blocks(self, tenant: Tenant) -> Blocks:
        """Return the memory of a tenant: when it was last measured, or declared."""
        return tenant.blocks() if tenant.is_asleep else self._declared or tenant.blocks()

    def expected(self) -> Blocks:
        """Return what a load or a wake will take; what of it still exists will be shared."""
        tenant = self.tenant
        alive = {**self.remains(), **(tenant.blocks() if tenant is not None else {})}
        return self._declared or {
            key if key in alive else (self.name, key): block
            for key, block in self.last_blocks.items()
        }

    def used(self) -> Blocks | None:
        """Return the used or admitted memory; None for a model that is neither there nor loading.

        A model that waits for room has both: the pieces that exist count once.
        """
        tenant, transition = self.tenant, self.transition
        admitted = None if transition is None else transition.admitted
        if tenant is None:
            return admitted
        return {**self.blocks(tenant), **(admitted or {})}

    def remains(self) -> Blocks:
        """Return the memory of unloaded models that callers still use."""
        self.unloaded = [one for one in self.unloaded if one.blocks()]
        return {key: block for one in self.unloaded for key, block in one.blocks().items()}

    # What changes it

    def lend(self, holder: Holder | None, load: Transition) -> Tenant | Transition:
        """Lend the model if it is loaded.

        Returns:
            The tenant, or the transition to wait for: ``load`` if the caller must load the model.

        Raises:
            ResourceClosedError: The host is closed.
            TorchUtilsError: This thread itself is loading or unloading the model.
        """
        with DeferredSignals(), self.changed:
            # The caller is counted before the state is read: a destructor that runs in the
            # middle of this cannot unload the model.
            if holder is not None:
                self.waiting.add(holder)
            self.ensure_lending()
            tenant, transition = self.tenant, self.transition
            if transition is not None:
                if transition.thread == threading.get_ident():
                    verb = transition.state.removesuffix("ing")
                    raise TorchUtilsError(
                        f"cannot lease {self.name} from its own {verb} function: it would deadlock"
                    )
                return transition
            if tenant is None or tenant.is_asleep:
                load.state = "loading" if tenant is None else "waking"
                self.transition = load
                return load
            if holder is not None:
                if self.max_leases is not None and len(self.leases) >= self.max_leases:
                    self._lease_end = self._lease_end or Transition("leased")
                    return self._lease_end
                self.leases[holder] = None
                self.waiting.discard(holder)
            return tenant

    def end_lease(self, holder: Holder) -> None:
        """End a lease, or the wait for one."""
        with DeferredSignals(), self.changed:
            if holder not in self.waiting and holder not in self.leases:
                return
            self.waiting.discard(holder)
            self.leases.pop(holder, None)
            if not self.leases:
                self.idle_since = time.monotonic()
                self._expires_at = self.idle_since + self.keep_alive_s
            self._wake_waiters()

    def arrive(self, load: Transition, tenant: Tenant) -> None:
        """End a load or a wake that succeeded."""
        with DeferredSignals():
            with self.changed:
                self.ensure_lending()
                if self.transition is not load:  # Its caller has given up.
                    raise TorchUtilsError(f"the load of {self.name} was interrupted")
                self.loads += self.tenant is None
                self.tenant, self.transition = tenant, None
                self.idle_since = time.monotonic()
                if self.keep_alive_s:  # One of 0 keeps a model that was loaded beforehand.
                    self._expires_at = self.idle_since + self.keep_alive_s
                self.last_error = None
                self.changed.notify_all()
            load.set_result(None)  # Without the lock, which a signal handler may need.

    def fail(self, load: Transition, error: BaseException | None) -> bool:
        """End a load or a wake that failed; return whether by an error, not by an interrupt."""
        if error is not None and not isinstance(error, Exception) and load.in_background:
            error = TorchUtilsError(f"loading {self.name} raised {error!r}")
        with DeferredSignals():
            with self.changed:
                if self.transition is not load:
                    return False
                shared = error if isinstance(error, Exception) else None
                if shared is not None:
                    self.last_error = repr_of(shared)
                self.transition, self._expires_at = None, math.inf
                self.changed.notify_all()
            # An interrupt or a lack of room may concern this thread only; the others try again.
            is_own = isinstance(shared, NoRoomError) and not load.in_background
            load.set_exception(None if is_own else shared)
        return shared is not None

    def depart(self, departure: Transition, may: Callable[[], bool]) -> Tenant | None:
        """Begin to unload the model, or to let it sleep, if ``may()`` is True under the lock."""
        with self.changed:
            tenant = self.tenant
            if self.transition is not None or tenant is None or not may():
                return None
            if departure.state == "sleeping" and tenant.is_asleep:
                return None
            self.transition = departure
            return tenant

    def leave(self, departure: Transition, is_asleep: bool) -> None:
        """End what `depart` began."""
        with self.changed:
            self.transition, self._expires_at = None, math.inf
            if not is_asleep and self.tenant is not None:
                self.leases.clear()  # Leases of an ended process, or at exit.
                self.unloads += 1
                self.unloaded.append(self.tenant.storages)
                self.remains()  # Forgets models that are gone.
                self.tenant = None
            self._wake_waiters()
        departure.set_result(None)

    def stop_lending(self) -> None:
        """Begin to close: open leases continue, but there are no new ones."""
        with self.changed:
            self.is_closing = True
            self._wake_waiters()

    def _wake_waiters(self) -> None:
        self.changed.notify_all()
        lease_end, self._lease_end = self._lease_end, None
        if lease_end is not None:
            lease_end.set_result(None)
