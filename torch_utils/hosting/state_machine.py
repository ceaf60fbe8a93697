"""The states of a hosted model: which there are, who may change them, and its memory.

The state of a host is its loaded model and its transition, which is what one thread is doing to it:

    unloaded -> loading -> loaded -> sleeping -> asleep -> waking -> loaded
                           loaded or asleep -> unloading -> unloaded, or closed

Only `StateMachine` changes them, under the one lock of all hosts:

    method    called by                                     from                 to
    lend      a lease, `load`, `wake`                       unloaded, asleep     loading, waking
    begin     `lend`, and a replacement without overlap     unloaded, asleep     loading, waking
    arrive    the thread that loads                         loading, waking      loaded
    fail      the thread that loads                         loading, waking      unloaded, asleep
    depart    `sleep`, `unload`, `close`, expiry, a pool    loaded, asleep       sleeping, unloading
    leave     the thread that departs                       sleeping, unloading  asleep, unloaded

From `lend` to `arrive` or `fail`, and from `depart` to `leave`, one thread has the loaded model for
itself and uses it without the lock; all others wait. `depart` refuses if the caller's condition
does not hold under the lock, for example if there is a lease. A sleep that is impossible leaves as
an unload. A forked child starts over, unloaded.

Requests for leases wait in one queue. Each change of the state serves the queue. If a model is
loaded, the first requests get it. Otherwise all of them try again, and one of them loads it.

A replacement loads beside the loaded model, without a transition, or in its place, after the end of
all leases. When it arrives beside the loaded model, that one is kept among the replaced ones until
its last lease ends. A replacement that was given up counts as memory until its load ends.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch_utils._release.storages import Storages
from torch_utils._resource import closed_error
from torch_utils._signals import DeferredSignals
from torch_utils.errors import ModelInUseError, NoRoomError, TorchUtilsError, repr_of
from torch_utils.hosting.footprint import Footprint, footprint_of
from torch_utils.hosting.loaded_model import LoadedModel

__all__ = ["CHANGED", "HostStatus", "Load", "Request", "State", "StateMachine", "Transition"]

State = Literal[
    "unloaded", "loading", "loaded", "sleeping", "asleep", "waking", "unloading", "closed"
]
_NAMED = 10  # leases in a message
MEASURE_S = 1.0
"""How often a model is measured at most, in seconds."""


class Request:
    """A lease, from its request to its end.

    Attributes:
        where: The line of the program that requested the lease, and its thread.
        thread: The thread that cannot end the lease while it waits for something: the caller's, or
            that of the coroutine's event loop. None for a generator, which any thread may resume.
        task: The id of the coroutine's task, because others of its thread can go on; or None.
        since: The time of the request, by `time.monotonic`.
        is_lease: Whether it is a lease; otherwise only the load is wanted.
        loaded: What it leases; None while it waits.
        model: Its model, if that is in this process.
        turn: Done when a request that waits should be looked at again; None before it waits.
        is_woken: Whether it is done, or is about to be.
    """

    def __init__(
        self, where: str, thread: int | None, task: int | None, is_lease: bool = True
    ) -> None:
        self.where = where
        self.thread = thread
        self.task = task
        self.is_lease = is_lease
        self.since: float = time.monotonic()
        self.loaded: LoadedModel | None = None
        self.model: Any = None
        self.turn: Future[None] | None = None
        self.is_woken = False


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
            tensors and arrays, or the memory of its process. 0 if it is not loaded. A model in this
            process is measured after its load, and within a second after the end of a lease.
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


class Transition:
    """What one thread does to a loaded model: it unloads it or lets it sleep.

    Attributes:
        state: The state of the host meanwhile.
        thread: The thread that does it; None before that thread has started.
    """

    def __init__(self, state: Any, thread: int | None) -> None:
        self.state = state
        self.thread = thread


class Load(Transition):
    """A load or a wake, perhaps of a replacement.

    Attributes:
        make: Makes the model of a replacement; None for that of the host.
        in_background: Whether a thread does it for all who wait, and not for itself.
        asked_by: The thread that cannot go on before; None if several wait, or a coroutine.
        admitted: The memory that a pool has reserved for the load; None before.
        is_made: Whether the load has that memory.
        no_room: Why the load waits for room; empty if it does not.
        outcome: True if its model is lent, False if its function is kept for the next load; None
            before.
        loaded: What it loads.
        is_given_up: Whether nobody waits for the replacement any more.
    """

    def __init__(self, in_background: bool = False) -> None:
        super().__init__("loading", None if in_background else threading.get_ident())
        self.make: Callable[[], LoadedModel] | None = None
        self.in_background = in_background
        self.asked_by: int | None = self.thread
        self.admitted: Footprint | None = None
        self.is_made = False
        self.no_room = ""
        self.outcome: bool | None = None
        self.loaded: LoadedModel | None = None
        self.is_given_up = False


class _Changed:
    """A lock, held without signal handlers and garbage collections, and a condition.

    Both could run code of the program, which may wait for a thread that waits for this lock.

    Attributes:
        later: Functions to call when this thread has let go of the lock.
    """

    def __init__(self) -> None:
        self.later: list[Callable[[], object]] = []
        self._lock: Any = threading.RLock()
        self._waiters: list[Any] = []
        self._depth = 0
        self._collects = False
        self._deferred = DeferredSignals()

    def __enter__(self) -> None:
        deferred = DeferredSignals()
        deferred.__enter__()
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._deferred, self._collects = deferred, gc.isenabled()
            gc.disable()

    def __exit__(self, *exception: object) -> None:
        if not self._lock._is_owned():  # An interrupt came before `wait` had taken it again.
            return
        later: list[Callable[[], object]] = []
        deferred, self._depth = self._deferred, self._depth - 1
        is_outer = self._depth == 0
        if is_outer:
            later, self.later = self.later, later
        if is_outer and self._collects:
            gc.enable()
        self._lock.release()  # Nothing in between makes an object, so nothing is collected yet.
        for call in later:
            call()
        if is_outer:
            deferred.__exit__(None, None, None)

    def wait(self, timeout_s: float) -> None:
        """Wait without the lock, which this thread holds once, until `notify_all`."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            self.__exit__()
            waiter.acquire(timeout=timeout_s)
        finally:
            self.__enter__()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def notify_all(self) -> None:
        """Wake all who wait, with the lock."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.release()

    def start_over(self) -> None:
        """Reset it in a forked child: a thread of the parent may have held it."""
        if self._depth and self._collects:
            gc.enable()
        self.__init__()  # type: ignore[misc]


CHANGED = _Changed()
"""The lock of all hosts, and the condition of all their changes. It is held for moments only."""


class StateMachine:
    """The loaded model of a host, its transition, its leases and its memory.

    Args:
        name: The name of the host.
        keep_alive_s: How long an idle model stays loaded.
        max_leases: How many leases there may be at a time; None for no limit.
        sizes: The declared size of the model, by device; empty to measure it.
        make: Makes a model, which is not loaded yet.

    Attributes:
        make: Makes the next model.
        loaded: The loaded model.
        transition: What is being done to it.
        replacement: The load that will replace the loaded model.
        replaced: Replaced models, which are closed when their last lease ends; whether that has
            begun.
        given_up: Replacements that were given up and still load.
        leases: The requests that have a lease, in order.
        waiting: The requests that wait for one, in order. For them the model stays loaded.
        drains: How many callers wait for the end of all leases; there are no new ones meanwhile.
        is_closing: Whether there are no new leases.
        idle_since: When the last lease ended, or the load, by `time.monotonic`.
        last_error: The repr of the last load's exception; None if it succeeded.
        last_footprint: The memory of the last load, or before the last sleep.
        unloaded: Unloaded models, parts of which may be in use.
    """

    def __init__(
        self,
        name: str,
        keep_alive_s: float,
        max_leases: int | None,
        sizes: dict[str, int],
        make: Callable[[], LoadedModel],
    ) -> None:
        self.name = name
        self.keep_alive_s = keep_alive_s
        self.max_leases: float = math.inf if max_leases is None else max_leases
        self.make: Callable[[], LoadedModel] = make
        self._declared = sizes
        self.start_over(is_closing=False)

    def start_over(self, is_closing: bool) -> None:
        """Set the state of an unloaded host, in a new one or in a forked child."""
        self.loaded: LoadedModel | None = None
        self.transition: Transition | None = None
        self.replacement: Load | None = None
        self.replaced: dict[LoadedModel, bool] = {}
        self.given_up: list[Load] = []
        self.leases: dict[Request, None] = {}
        self.waiting: dict[Request, None] = {}
        self.drains: int = 0
        self._drained_since = 0.0
        self.is_closing: bool = is_closing
        self.idle_since: float = 0.0
        self._expires_at = math.inf
        self.measured_at: float = 0.0
        self.is_stale: bool = False  # Whether a lease has ended since it was measured.
        self.loads: int = 0
        self.unloads: int = 0
        self.last_error: str | None = None
        self.last_footprint: Footprint = {}
        self.unloaded: list[Storages] = []

    # What the state is

    @property
    def state(self) -> State:
        """The state; "unloaded" also if the model is lost; see `is_lost`."""
        loaded, transition = self.loaded, self.transition
        if transition is not None:
            return transition.state  # type: ignore[no-any-return]
        if loaded is not None and loaded.is_alive():
            return "asleep" if loaded.is_asleep else "loaded"
        return "closed" if self.is_closing else "unloaded"

    def is_lost(self) -> bool:
        """Return whether the model's process has ended, or the program has released the model."""
        loaded = self.loaded
        return loaded is not None and not loaded.is_alive()

    def is_queued(self) -> bool:
        """Return whether a load waits for room in the pool, which others may use for any time."""
        load = None if self.is_closing else self.transition
        return isinstance(load, Load) and load.admitted is None

    def is_leased(self, loaded: LoadedModel | None) -> bool:
        """Return whether there is a lease of a loaded model."""
        return any(lease.loaded is loaded for lease in list(self.leases))

    def is_held_by(self, thread: int | None, task: int | None = None) -> bool:
        """Return whether a lease cannot end while this thread, or this task of it, waits."""
        return thread is not None and any(
            lease.thread == thread and (task is None or lease.task in (None, task))
            for lease in list(self.leases)
        )

    def is_changed_by(self, thread: int) -> bool:
        """Return whether a thread loads, unloads or replaces the model."""
        changes = self.transition, self.replacement
        return any(one is not None and one.thread == thread for one in changes)

    def can_be_replaced(self, in_pool: bool) -> bool:
        """Return whether nothing is under way, or only a load that waits for room in a pool."""
        is_queued = in_pool and self.is_queued() and self.loaded is None
        return self.replacement is None and (self.transition is None or is_queued)

    def is_in_use(self, swap: Load | None) -> bool:
        """Return whether there is a lease, or a model besides the loaded and the next one."""
        return bool(self.leases or self.replaced) or self.replacement not in (None, swap)

    def is_idle(self, is_asleep: bool = False) -> bool:
        """Return whether it is awake, or asleep, not leased, and without waiting callers."""
        loaded = self.loaded
        if loaded is None or self.transition or self.waiting or loaded.is_asleep != is_asleep:
            return False
        return not self.is_leased(loaded)

    def is_asleep(self) -> bool:
        """Return whether it is asleep, and without waiting callers."""
        return self.is_idle(is_asleep=True)

    def is_due(self) -> bool:
        """Return whether it is idle and its keep-alive time is over."""
        return self.is_idle() and self.expires_at() <= time.monotonic()

    def expires_at(self) -> float:
        """Return when an idle model is due, by `time.monotonic`."""
        return self.idle_since if self.is_closing else self._expires_at

    def next_measurement(self) -> float:
        """Return when the model should be measured, by `time.monotonic`."""
        return self.measured_at + MEASURE_S if self.is_stale else math.inf

    def has_work(self) -> bool:
        """Return whether a thread should unload or measure a model now."""
        is_due = self.is_due() or self.next_measurement() <= time.monotonic()
        return is_due or any(not self.is_leased(loaded) for loaded in list(self.replaced))

    def threads(self) -> set[int | None]:
        """Return the threads that hold a lease or do a transition.

        None stands for one that is not known, or that may change.
        """
        changes = self.transition, self.replacement, *list(self.given_up)
        threads = {lease.thread for lease in list(self.leases)}
        return threads | {one.thread for one in changes if one is not None}

    def in_use(self) -> ModelInUseError:
        """Return an error that names the oldest leases."""
        now, leases = time.monotonic(), list(self.leases)
        if not leases:
            state = self.state if self.replacement is None else "being replaced"
            return ModelInUseError(f"{self.name} is {state}")
        taken = "; ".join(f"taken at {h.where}, {now - h.since:.1f} s ago" for h in leases[:_NAMED])
        if len(leases) > _NAMED:
            taken += f"; and {len(leases) - _NAMED} more"
        count = f"{len(leases)} open lease{'s' * (len(leases) > 1)}"
        return ModelInUseError(f"{self.name} has {count}: {taken}; end them first")

    def ensure_lending(self) -> None:
        """Raise an error if the host no longer lends."""
        if self.is_closing:
            raise closed_error(f"{self.name} is closed; create a new host, or add it to its pool")

    def ensure_wanted(self, load: Load) -> None:
        """Raise an error if the host no longer lends, or a replacement was given up."""
        self.ensure_lending()
        if load.is_given_up:
            raise TorchUtilsError(f"the load of {self.name} was interrupted")

    # Its memory

    def measure(self) -> None:
        """Measure the model again, which may have grown or moved, unless it is in a transition."""
        self.measured_at, self.is_stale = time.monotonic(), False
        loaded = self.loaded
        if loaded is not None and self.transition is None:
            loaded.measure()

    def sizes(self) -> dict[str, int]:
        """Return the memory of the loaded and the replaced models by device, as last measured."""
        total = Counter[str]()
        for loaded in (self.loaded, *list(self.replaced)):
            if loaded is not None and loaded.is_alive():
                is_declared = self._declared and not loaded.is_asleep
                total.update(self._declared if is_declared else loaded.sizes())
        return dict(total)

    def footprint(self, loaded: LoadedModel) -> Footprint:
        """Return the memory of a loaded model: when it was last measured, or declared."""
        if self._declared and not loaded.is_asleep:
            return footprint_of(loaded, self._declared)
        return loaded.footprint()

    def expected(self, load: Load) -> Footprint:
        """Return what a load or a wake will take; what of it still exists will be shared."""
        if self._declared:
            return footprint_of(load, self._declared)
        with CHANGED:
            loaded = self.loaded
            alive = {**self.remains(), **(loaded.footprint() if loaded is not None else {})}
            return {
                key if key in alive and load is not self.replacement else (load, key): block
                for key, block in self.last_footprint.items()
            }

    def used(self, apart_from: Load | None = None) -> list[Footprint]:
        """Return the used or admitted memory of each model that is there or loads.

        A model that waits for room to wake has both: the pieces that exist count once.
        """
        found = [self.footprint(loaded) for loaded in list(self.replaced)]
        found += [load.admitted for load in list(self.given_up) if load.admitted is not None]
        for loaded, load in (self.loaded, self.transition), (None, self.replacement):
            admitted = load.admitted if isinstance(load, Load) else None
            if load is not None and load is apart_from:
                continue
            if loaded is not None:
                found.append({**self.footprint(loaded), **(admitted or {})})
            elif admitted is not None:
                found.append(admitted)
        return found

    def remains(self) -> Footprint:
        """Return the memory of unloaded models that callers still use."""
        self.unloaded = [one for one in self.unloaded if one.footprint()]
        return {key: block for one in self.unloaded for key, block in one.footprint().items()}

    # What changes it

    def lend(self, request: Request, load: Load) -> bool:
        """Lend the model, or let the request wait for its turn.

        Returns:
            Whether the caller must load or wake the model: ``load`` has begun.

        Raises:
            ResourceClosedError: The host is closed.
            TorchUtilsError: This thread itself is loading or unloading the model.
        """
        with CHANGED:
            if request.loaded is not None:
                return False
            self.ensure_lending()
            transition = self.transition
            if transition is not None and transition.thread == threading.get_ident():
                verb = {"waking": "wake"}.get(
                    transition.state, transition.state.removesuffix("ing")
                )
                raise TorchUtilsError(
                    f"cannot lease {self.name} from its own {verb} function: it would deadlock"
                )
            if self._has_place(request) and not (self.waiting and request.is_lease):
                self._grant(request)
                return False
            request.turn, request.is_woken = Future(), False
            self.waiting[request] = None
            has_begun = self.begin(load)
            if not has_begun:
                self._serve()
            return has_begun

    def _is_ready(self) -> bool:
        loaded = self.loaded
        if self.transition is not None or loaded is None or loaded.is_asleep:
            return False
        return loaded.is_alive()

    def _has_place(self, request: Request) -> bool:
        if self.is_closing or not self._is_ready():
            return False
        is_late = self.drains > 0 and request.since >= self._drained_since
        # Leases of the same caller cannot end while it waits for their end.
        if is_late and not self.is_held_by(request.thread, request.task):
            return False
        return not request.is_lease or len(self.leases) < self.max_leases

    def begin(self, load: Load) -> bool:
        """Begin a load or a wake if the model is not loaded and nothing else is under way.

        The caller holds the lock.
        """
        loaded = self.loaded
        is_draining = self.drains > 0 and load is not self.replacement
        if self.transition or is_draining or (loaded is not None and not loaded.is_asleep):
            return False
        load.state = "loading" if loaded is None else "waking"
        self.transition = load
        return True

    def _grant(self, request: Request) -> None:
        self.waiting.pop(request, None)
        if request.is_lease:
            self.leases[request] = None
        request.loaded = self.loaded
        request.model = getattr(self.loaded, "model", None)
        self._wake(request, None)

    def _wake(self, request: Request, error: Exception | None) -> None:
        turn = request.turn
        if turn is not None and not request.is_woken:
            request.is_woken = True
            # Without the lock, which a callback of the future may need.
            end = turn.set_result if error is None else turn.set_exception
            CHANGED.later.append(partial(end, error))  # type: ignore[arg-type]

    def _serve(self) -> None:
        """Lend the loaded model to waiting requests, in order; otherwise let them try again."""
        for request in list(self.waiting):
            if self._has_place(request):
                self._grant(request)
            elif not self.drains and request.is_lease:
                break
        if self.is_closing or not (self.transition or self.drains or self._is_ready()):
            for request in self.waiting:
                self._wake(request, None)

    def _change(self) -> None:
        """Serve the queue, and wake the threads that wait for a change of the state."""
        self._serve()
        CHANGED.notify_all()

    def end_lease(self, request: Request) -> bool:
        """End a lease, or the wait for one.

        Returns:
            Whether it is the first that ended since the model was measured.
        """
        with CHANGED:
            if request not in self.waiting and request not in self.leases:
                return False
            is_first, self.is_stale = not self.is_stale, True
            loaded = request.loaded
            self.waiting.pop(request, None)
            self.leases.pop(request, None)
            if not self.is_leased(self.loaded):
                self.idle_since = time.monotonic()
                self._expires_at = self.idle_since + self.keep_alive_s
            self._serve()
            if loaded is None or not self.is_leased(loaded):  # Others wait for that only.
                CHANGED.notify_all()
            return is_first

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Let new leases wait in this block, except for inner ones of callers that hold one.

        Use it in the library's own threads, where no signal handler can interrupt it.
        """
        has_begun = False
        try:
            with CHANGED:
                self._drained_since = self._drained_since if self.drains else time.monotonic()
                self.drains += 1
                has_begun = True
                self._serve()
            yield
        finally:
            with CHANGED:
                self.drains = max(0, self.drains - has_begun)  # A forked child starts over.
                self._change()

    def arrive(self, load: Load, loaded: LoadedModel) -> bool:
        """End a load or a wake that succeeded.

        Returns:
            False if a replacement has to wait for the end of the transition.
        """
        former = self.make  # noqa: F841  (Dropped without the lock: it may run destructors.)
        with CHANGED:
            self.ensure_wanted(load)
            if load is self.replacement:
                if self.transition not in (None, load):
                    return False
                if self.loaded is not None:
                    self.replaced[self.loaded] = False
                self.replacement = None
            elif load is not self.transition:  # Its caller has given up.
                raise TorchUtilsError(f"the load of {self.name} was interrupted")
            if load.make is not None:
                self.make, self.last_footprint = load.make, self.footprint(loaded)
            self.loads += self.loaded is not loaded
            self.loaded, self.transition, load.outcome = loaded, None, True
            self.idle_since = self.measured_at = time.monotonic()
            if self.keep_alive_s:  # One of 0 keeps a model that was loaded beforehand.
                self._expires_at = self.idle_since + self.keep_alive_s
            self.last_error = None
            self._change()
            return True

    def fail(self, load: Load, error: BaseException | None) -> bool:
        """End a load or a wake that failed; return whether by an error, not by an interrupt."""
        if error is not None and not isinstance(error, Exception) and load.in_background:
            error = TorchUtilsError(f"loading {self.name} raised {repr_of(error)}")
        shared = error if isinstance(error, Exception) else None
        text = None if shared is None else repr_of(shared)
        with CHANGED:
            if load in self.given_up:
                self.given_up.remove(load)
                self._change()
            if load not in (self.transition, self.replacement):
                return False
            # A lack of room may concern this thread only; the others try again. So they do after
            # a replacement, which somebody else wanted.
            is_own = isinstance(shared, NoRoomError) and not load.in_background
            is_own |= load is self.replacement
            if load is self.replacement:
                self.replacement = None
            if load is self.transition:
                self.transition, self._expires_at = None, math.inf
            if shared is not None:
                self.last_error = text
                if not is_own:
                    for request in list(self.waiting):
                        del self.waiting[request]
                        self._wake(request, shared)
            self._change()
            return shared is not None

    def give_up(self, load: Load) -> None:
        """Let the old model stay, unless a replacement has arrived."""
        with CHANGED:
            load.is_given_up = load.outcome is None
            if load in (self.transition, self.replacement):
                self.fail(load, None)
                self.given_up.append(load)
            self._change()

    def depart(self, departure: Transition, may: Callable[[], bool]) -> LoadedModel | None:
        """Begin to unload the model, or to let it sleep, if ``may()`` is True under the lock."""
        with CHANGED:
            loaded = self.loaded
            if self.transition is not None or loaded is None or not may():
                return None
            if departure.state == "sleeping" and loaded.is_asleep:
                return None
            self.transition = departure
            return loaded

    def leave(self, is_asleep: bool) -> None:
        """End what `depart` began."""
        with CHANGED:
            self.transition, self._expires_at = None, math.inf
            loaded = self.loaded
            if not is_asleep and loaded is not None:
                self.loaded = None
                self._forget(loaded)
            self._change()

    def take_replaced(self, even_if_leased: bool) -> LoadedModel | None:
        """Return a replaced model that nobody leases, for the caller to close."""
        with CHANGED:
            for loaded, is_taken in self.replaced.items():
                if not is_taken and (even_if_leased or not self.is_leased(loaded)):
                    self.replaced[loaded] = True
                    return loaded
            return None

    def leave_replaced(self, loaded: LoadedModel) -> None:
        """End what `take_replaced` began."""
        with CHANGED:
            self.replaced.pop(loaded, None)
            self._forget(loaded)
            self._change()

    def _forget(self, loaded: LoadedModel) -> None:
        for lease in list(self.leases):
            if lease.loaded is loaded:  # Of an ended process, or at exit.
                del self.leases[lease]
        self.unloads += 1
        self.unloaded.append(loaded.storages)
        self.remains()  # Forgets models that are gone.

    def stop_lending(self) -> None:
        """Begin to close: open leases continue, but there are no new ones."""
        with CHANGED:
            self.is_closing = True
            self._change()
