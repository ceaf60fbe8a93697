"""ModelHost: loads a model on demand, lends it, and lets it sleep or unloads it when it is idle.

`torch_utils.hosting.state_machine` has the states and what changes them. Here is what the threads
do in between: they load, wake, let sleep, unload, replace, wait for the end of the keep-alive time,
and close.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Generic, Literal, TypeVar

from torch_utils._memory import share_heap
from torch_utils._oom import clear_exception_frames, is_out_of_memory
from torch_utils._registry import EXIT_WAIT_S, REGISTRY, Entry
from torch_utils._report import CleanupReport
from torch_utils._resource import closes_on_error
from torch_utils._runtime import early_bound, is_shutting_down, log, notify
from torch_utils._signals import DeferredSignals
from torch_utils.errors import ModelInUseError, NoRoomError, TorchUtilsError, repr_of
from torch_utils.hosting import arguments
from torch_utils.hosting.footprint import Footprint
from torch_utils.hosting.lease import CLOSE_S, AsyncLease, Lease, ModelLender
from torch_utils.hosting.loaded_model import WARNING, LoadedModel, ThreadModel
from torch_utils.hosting.process import ModelProcess, pickled_load
from torch_utils.hosting.state_machine import (
    CHANGED,
    HostStatus,
    Load,
    Request,
    State,
    StateMachine,
    Transition,
)
from torch_utils.hosting.threads import (
    LONGEST_WAIT_S,
    Expiry,
    in_thread,
    wait_in_loop,
    wait_in_thread,
)

__all__ = ["HostStatus", "ModelHost"]

M = TypeVar("M")
T = TypeVar("T")

LEASES_AT_EXIT_S = 1.0
"""How long the exit callback waits for leases of other threads in all, in seconds."""


class ModelHost(ModelLender, Generic[M]):
    """Load a model on demand, lend it to threads and coroutines, and unload it when it is idle.

    ::

        host = ModelHost(load_model, keep_alive="5m")
        with host.lease() as model:
            model.encode(texts)

    Concurrent callers share one load and its exception; the next lease tries again. A model is
    never unloaded while it is leased. The host is closed at exit at the latest. A forked child does
    not use or close its parent's model; it loads its own. While a model is loaded, one daemon
    thread waits for its keep-alive time to pass. Hosts let further threads share one heap of glibc,
    so that their memory can be returned, unless the environment has ``MALLOC_`` variables.

    Args:
        load: Returns the model, a new one at each call. Called in the thread that first needs the
            model, or in another one for a coroutine.
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
        call_timeout_s: Seconds after which a call of the model must answer, with
            ``isolation="process"``. Otherwise the process is killed and the call raises
            `ModelProcessError`; the next lease starts a new process. None for no limit.
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
        nbytes: arguments.Devices | None = None,
        max_leases: int | None = None,
        call_timeout_s: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if idle not in ("unload", "sleep"):
            raise ValueError(f'idle must be "unload" or "sleep", got {idle!r}')
        if isolation not in ("thread", "process"):
            raise ValueError(f'isolation must be "thread" or "process", got {isolation!r}')
        if max_leases is not None:
            arguments.check_positive("max_leases", max_leases)
        if call_timeout_s is not None:
            arguments.check_seconds("call_timeout_s", call_timeout_s)
        if isolation == "thread" and not (call_timeout_s is None and environment is None):
            raise ValueError('call_timeout_s and environment need isolation="process"')
        function: Any = load.func if isinstance(load, partial) else load
        self.name: str = name or str(getattr(function, "__qualname__", type(function).__qualname__))
        self.isolation: str = isolation
        self._of_process = self.name, environment, call_timeout_s
        self._sleeps = idle == "sleep"
        self._cannot_sleep = ""  # Why it last could not sleep: the log has it once.
        sizes = {} if nbytes is None else arguments.parse_sizes("nbytes", nbytes, "host")
        self._pool: Any = None
        self._is_pinned = False
        keep_alive_s, make = arguments.parse_keep_alive(keep_alive), self._maker(load)
        self._machine: StateMachine = StateMachine(self.name, keep_alive_s, max_leases, sizes, make)
        self._expiry: Expiry = Expiry(self)
        share_heap()
        HOSTS[id(self)] = self

    def _maker(self, load: Any) -> Callable[[], LoadedModel]:
        """Return the function that makes a model, which is not loaded yet."""
        is_model = callable(getattr(type(load), "forward", None))  # An nn.Module is callable.
        is_async = any(map(iscoroutinefunction, (load, getattr(type(load), "__call__", None))))  # noqa: B004
        if not callable(load) or is_model or is_async:
            raise TypeError(f"load must be a plain function that returns the model, got {load!r}")
        if self.isolation == "process":
            return partial(ModelProcess, pickled_load(load), *self._of_process)
        return partial(ThreadModel, self.name, load)

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
        return Lease(self, timeout_s)

    def alease(self, timeout_s: float | None = None) -> AsyncLease[M]:
        """Return a context manager that lends the model for an ``async with`` block.

        A thread loads the model while the event loop continues. A cancelled coroutine keeps no
        lease, but the load continues, and so does a call that runs in the model's process: the next
        call waits until it has returned.

        Args:
            timeout_s: Seconds to wait, including the load; None for no limit.

        Raises:
            TimeoutError: ``timeout_s`` has passed. `lease` lists the other exceptions.
        """
        return AsyncLease(self, timeout_s)

    def call(
        self, function: Callable[[M], T], *, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, T]:
        """Lease the model, and call ``function(model)`` in a thread.

        ::

            vectors = await host.call(lambda model: model.encode(texts), timeout_s=30)

        A caller that is cancelled before the function began keeps no lease, as with `alease`. Later
        the answer is dropped: the model stays leased until the function has returned, and its
        process continues.

        Args:
            function: The function. A thread that has called one may call the next one.
            timeout_s: As for `alease`. It does not limit the function.

        Returns:
            A coroutine that returns what the function returns.

        Raises:
            Exception: The function or `lease` raised it.
        """
        return self.alease(timeout_s).call(function)

    def load(self) -> bool:
        """Load the model now, before the first lease.

        Returns:
            True if this call loaded it. False if it was loaded already or by another thread.

        Raises:
            ResourceClosedError: The host is closed.
            Exception: ``load`` raised it, in this thread or in the one that this thread waited for.
        """
        request = Request("", threading.get_ident(), None, is_lease=False)
        try:
            return self._acquire(request, None)
        except BaseException:  # An interrupt must not leave the request in the queue.
            self._machine.end_lease(request)
            raise

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
        """Move the model to host memory; the next lease wakes it. It waits as `unload` does.

        Returns:
            True if this call did it. False if the model was not loaded or was asleep, or if it
            cannot sleep and was unloaded instead; the log then says why.

        Raises:
            ModelInUseError: The model is leased. The message names each lease.
            ResourceClosedError: The host is closed.
        """
        self.ensure_open()
        report = self._empty("requested", 0.0, math.inf, sleeps=True)
        return report is not None and self.state == "asleep"

    def unload(self, timeout_s: float | None = None) -> CleanupReport:
        """Unload the model; the next lease loads it again.

        It waits for a load that is under way, unless that waits for room in a pool.

        Args:
            timeout_s: Seconds to wait for the end of leases. New leases wait meanwhile, and load
                the model again. None to raise an error at once if the model is leased.

        Returns:
            The report of the release; an empty one if the model was not loaded. Its ``errors`` say
            if the model could only be dropped.

        Raises:
            ModelInUseError: The model is leased, also after ``timeout_s``, or by this thread. The
                message names each lease.
            TypeError: ``timeout_s`` is not a number.
            ValueError: It is negative or not finite.
            ResourceClosedError: The host is closed.
        """
        if timeout_s is not None:
            arguments.check_seconds("timeout_s", timeout_s)
        self.ensure_open()
        if timeout_s is None:
            return self._empty("requested", 0.0, math.inf) or CleanupReport()
        if self._machine.is_held_by(threading.get_ident()):
            raise self._machine.in_use()
        until = time.monotonic() + timeout_s
        future = in_thread(partial(self._drain, until))
        wait_in_thread(future)
        return future.result()

    def replace(
        self, load: Callable[[], M], *, overlap: bool = True, timeout_s: float | None = None
    ) -> bool:
        """Load a new version of the model, and lend that one from then on.

        The old model serves until the new one is loaded, and is released when its last lease ends.
        If the load fails, the old one goes on. If the host is not loaded, or asleep, the next lease
        calls the new ``load``. Several calls take turns.

        Args:
            load: Returns the new model. Called in a thread of its own.
            overlap: Whether both models may be in memory at the same time. If False, new leases
                wait until the leases of the old model have ended, the old model is unloaded, and
                the new one is loaded. If that load fails, the next lease loads the old one again.
            timeout_s: Seconds until the new model must be lent; None for no limit.

        Returns:
            True if this call loaded the new model; False if the host was not loaded.

        Raises:
            TimeoutError: ``timeout_s`` has passed; the old model stays. What ``load`` returns later
                is dropped.
            ModelInUseError: ``overlap`` is False, and this thread itself has a lease.
            NoRoomError: The pool had no room in time. The message says what takes it.
            TypeError: ``load`` is not a plain function; or ``timeout_s`` is not a number.
            ValueError: ``timeout_s`` is negative or not finite.
            ResourceClosedError: The host is closed.
            Exception: ``load`` raised it.
        """
        work, swap = self._replacing(load, overlap, timeout_s), Load(in_background=True)
        swap.asked_by = threading.get_ident()
        future = in_thread(partial(work, swap))
        try:
            wait_in_thread(future, timeout_s)
        finally:
            self._end_wait(future, swap)
        return self._replaced(future, swap, timeout_s)

    async def areplace(
        self, load: Callable[[], M], *, overlap: bool = True, timeout_s: float | None = None
    ) -> bool:
        """Replace the model in a thread, while the event loop continues. See `replace`.

        If the caller is cancelled before the new model is lent, the old one stays.
        """
        work = self._replacing(load, overlap, timeout_s, id(asyncio.current_task()))
        swap = Load(in_background=True)
        future = in_thread(partial(work, swap))
        try:
            await wait_in_loop(future, timeout_s)
        finally:
            self._end_wait(future, swap)
        return self._replaced(future, swap, timeout_s)

    def _end_wait(self, future: Future[bool], swap: Load) -> None:
        """Give up a replacement that has not arrived; the exit waits for its thread."""
        if future.done():
            return
        self._machine.give_up(swap)
        if swap.is_given_up:
            if isinstance(swap.loaded, ModelProcess):
                swap.loaded.kill()
            entry = Entry(id(future), "a load", lambda: future, _wait_at_exit)
            REGISTRY.add(entry)
            future.add_done_callback(lambda _: REGISTRY.discard(entry))

    def _replaced(self, future: Future[bool], swap: Load, timeout_s: float | None) -> bool:
        if swap.outcome is not None and not future.done():
            return swap.outcome
        if not swap.is_given_up:
            return future.result()
        if swap.no_room:
            raise NoRoomError(swap.no_room)
        raise TimeoutError(
            f"{self.name} was not replaced within {timeout_s} s; the old model stays"
        )

    def status(self) -> HostStatus:
        """Return the current state. Never loads or measures the model, and never waits."""
        machine, now, state = self._machine, time.monotonic(), self.state
        is_idle = state == "loaded" and not machine.is_leased(machine.loaded)
        expires_in_s = max(0.0, machine.expires_at() - now)
        sizes = {} if state == "unloaded" else machine.sizes()
        return HostStatus(
            name=self.name,
            state=state,
            leases=len(machine.leases),
            loads=machine.loads,
            unloads=machine.unloads,
            nbytes=sum(sizes.values()),
            nbytes_by_device=sizes,
            idle_s=max(0.0, now - machine.idle_since) if is_idle else None,
            expires_in_s=expires_in_s if is_idle and expires_in_s < math.inf else None,
            last_error=machine.last_error,
        )

    @property
    def state(self) -> State:
        """The state, as in `status`; "unloaded" also if the model is lost."""
        return self._machine.state

    # Leases

    def _acquire(self, request: Request, timeout_s: float | None) -> bool:
        """Wait until the model is lent; load it in this thread unless another one does.

        A process is started in the background if the wait is limited.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        in_background = timeout_s is not None and self.isolation == "process"
        has_loaded = False
        while True:
            has_loaded |= self._try(request, deadline, in_background)
            if request.loaded is not None:
                return has_loaded
            turn: Any = request.turn
            wait_in_thread(turn, _seconds_until(deadline))
            self._check_waited(request, timeout_s)

    async def _aacquire(self, request: Request, timeout_s: float | None) -> None:
        """Wait until the model is lent; a thread loads it if no other caller does."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._try(request, math.inf, in_background=True)
            if request.loaded is not None:
                return
            turn: Any = request.turn
            await wait_in_loop(turn, _seconds_until(deadline))
            self._check_waited(request, timeout_s)

    def _try(self, request: Request, deadline: float, in_background: bool) -> bool:
        """Lend the model, if it is there; return whether this call has begun to load it."""
        if self._machine.is_lost():
            self._unload_if(self._machine.is_lost, "lost")
        load = Load(in_background)
        try:
            begins = self._machine.lend(request, load)
            if begins and in_background:
                in_thread(partial(self._load, load, math.inf))
            elif begins:
                self._load(load, deadline)
            return begins
        except BaseException:  # An interrupt may have come before the load.
            self._machine.fail(load, None)
            raise

    def _check_waited(self, request: Request, timeout_s: float | None) -> None:
        """Raise the exception of a load, or an error if the time is over."""
        if request.turn is not None and request.turn.done():
            return request.turn.result()
        transition, what = self._machine.transition, "leased"
        if transition is not None:
            what = transition.state
            if isinstance(transition, Load) and transition.no_room:
                raise NoRoomError(transition.no_room)
        leases = f" ({self._machine.in_use()})" if what == "leased" else ""
        raise TimeoutError(
            f"{self.name} is still {what} after {timeout_s} s{leases}; pass a larger timeout_s"
        )

    # Loading

    def _load(self, load: Load, deadline: float) -> None:
        """Load or wake the model, which the load has for this thread, if a pool admits it."""
        load.thread = threading.get_ident()
        machine, began = self._machine, time.monotonic()
        loaded = machine.loaded if load.state == "waking" else None
        wakes = loaded is not None
        self._register_in_child()
        try:
            if self._pool is not None:
                self._pool._admit(self, load, machine.expected(load), deadline)
                began = time.monotonic()
            load.loaded = loaded = loaded or (load.make or machine.make)()
            self._make(loaded)
            if not wakes:
                if isinstance(loaded, ThreadModel):
                    self._refuse_model_in_use(loaded)
                footprint = machine.footprint(loaded)
                if load.make is None:
                    machine.last_footprint = footprint
                self._warn_if_unknown(loaded, footprint)
                if self._pool is not None:
                    self._pool._admit(self, load, footprint, deadline)
            with DeferredSignals():
                while not machine.arrive(load, loaded):
                    with CHANGED:
                        if machine.transition is not None:
                            self._wait_for_replacing(load, deadline)
                self._expiry.start(machine)
        except BaseException as error:
            if isinstance(error, Exception):
                clear_exception_frames(error)  # They would keep a partly loaded model alive.
            try:
                if loaded is not None and machine.loaded is not loaded:
                    loaded.close()
            finally:
                if machine.fail(load, error) and not wakes:
                    self._notify_load("error", began)
            if machine.is_closing:  # `close` has not waited for this.
                self._unload_if(lambda: not machine.leases, "closed")
            elif self._is_pinned and isinstance(error, NoRoomError) and deadline < math.inf:
                self._try(Request("", None, None, is_lease=False), math.inf, in_background=True)
            raise
        if not wakes:
            self._notify_load("success", began)

    def _refuse_model_in_use(self, loaded: ThreadModel) -> None:
        others = [self._machine.loaded, *list(self._machine.replaced)]
        if any(loaded.model is other.model for other in others if isinstance(other, ThreadModel)):
            loaded.model = None  # It must not be released.
            raise TorchUtilsError(
                f"the load function of {self.name} returned the model in use; it must load a new "
                "one, so do not cache it"
            )

    def _notify_load(self, outcome: str, began: float) -> None:
        notify("load", model=self.name, outcome=outcome, duration_s=time.monotonic() - began)

    def _make(self, loaded: LoadedModel) -> None:
        """Load or wake the model; if memory runs out, let the pool make room, and try once more."""
        wakes = loaded.is_asleep
        for is_last in (False, True):
            try:
                loaded.wake() if wakes else loaded.load()
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                clear_exception_frames(error)
                if is_last or self._pool is None or not self._pool._evict_idle(self):
                    if not wakes:
                        raise
                    what = f"no room to wake {self.name}; it is still asleep: {error}"
                    raise NoRoomError(what) from None

    def _warn_if_unknown(self, loaded: LoadedModel, footprint: Footprint) -> None:
        """Log if the model is not measured, and a pool or the unload needs to know it."""
        can_close = hasattr(type(getattr(loaded, "model", loaded)), "close")
        needs_size = self._pool is not None and self._pool._has_budget
        if not footprint and (needs_size or not can_close):
            what = "%s holds no tensors or arrays that can be counted; declare nbytes=, and return "
            log(WARNING, what + "an object with close()", self.name)

    # Replacing

    def _replacing(
        self, load: Any, overlap: bool, timeout_s: float | None, task: int | None = None
    ) -> Callable[[Load], bool]:
        """Check the arguments of `replace`, and return what its thread does."""
        deadline, machine, me = math.inf, self._machine, threading.get_ident()
        if timeout_s is not None:
            arguments.check_seconds("timeout_s", timeout_s)
            deadline = time.monotonic() + timeout_s
        make = self._maker(load)
        machine.ensure_lending()
        if machine.is_changed_by(me):
            raise TorchUtilsError(f"cannot replace {self.name} from its own load function")
        if not overlap and machine.is_held_by(me, task):
            raise machine.in_use()
        return partial(self._replace, make, overlap, deadline)

    def _replace(
        self, make: Callable[[], LoadedModel], overlap: bool, deadline: float, swap: Load
    ) -> bool:
        """Load a model in place of the loaded one; without one, keep the function for later."""
        machine = self._machine
        swap.thread, swap.make = threading.get_ident(), make
        former = machine.make  # noqa: F841  (Dropped without the lock: it may run destructors.)
        try:
            while True:
                with CHANGED:
                    machine.ensure_wanted(swap)
                    while not machine.can_be_replaced(self._pool is not None):
                        self._wait_for_replacing(swap, deadline)
                    if machine.loaded is None:
                        machine.make, machine.last_footprint, swap.outcome = make, {}, False
                        return False
                    if machine.state == "loaded":
                        machine.replacement = swap
                        break
                self._unload_if(lambda: machine.state != "loaded", "replaced")
            if overlap:
                self._load(swap, deadline)
            else:
                with machine.draining():
                    try:
                        self._empty("replaced", deadline, deadline, swap=swap)
                    except ModelInUseError as error:
                        raise TimeoutError(f"{error}; the old model stays") from None
                    with CHANGED:
                        machine.begin(swap)
                self._load(swap, deadline)
        finally:
            machine.fail(swap, None)
        self._close_replaced()
        return True

    def _wait_for_replacing(self, swap: Load, deadline: float) -> None:
        """Wait for a change of the state, with the lock."""
        machine = self._machine
        machine.ensure_wanted(swap)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{self.name} is still {machine.state}; the old model stays")
        CHANGED.wait(min(left, LONGEST_WAIT_S))

    def _close_replaced(self, even_if_leased: bool = False) -> None:
        """Release the replaced models that nobody leases."""
        machine = self._machine
        while machine.replaced:
            with DeferredSignals():
                loaded = machine.take_replaced(even_if_leased)
                if loaded is None:
                    return
                try:
                    self._close(loaded)
                finally:
                    machine.leave_replaced(loaded)
            notify("unload", model=self.name, reason="replaced")

    # Sleeping and unloading

    def _do_what_is_due(self) -> None:
        """After leases: release replaced models, and measure or unload the model when due."""
        machine = self._machine
        self._close_replaced()
        if machine.is_due():
            reason = "closed" if machine.is_closing else "idle"
            self._unload_if(machine.is_due, reason, self._sleeps and not machine.is_closing)
        elif machine.next_measurement() <= time.monotonic():
            machine.measure()

    def _unload_if(
        self, may: Callable[[], bool], reason: str, sleeps: bool = False
    ) -> CleanupReport | None:
        """Unload the model if ``may()`` returns True; None if there was no unload.

        Args:
            may: Called under the lock.
            reason: Why, for metrics.
            sleeps: Whether it is to sleep instead, if it can.
        """
        state = "sleeping" if sleeps else "unloading"
        departure = Transition(state, threading.get_ident())
        with DeferredSignals():
            loaded = self._machine.depart(departure, may)
            if loaded is None:
                return None
            was_alive = loaded.is_alive()
            is_asleep = False
            try:
                is_asleep = sleeps and was_alive and self._sleep(loaded)
                is_asleep = is_asleep and not self._machine.is_closing
                if not is_asleep:
                    self._close(loaded)
            finally:
                self._machine.leave(is_asleep)
                self._expiry.look()  # Ends the thread.
            if not is_asleep:
                notify("unload", model=self.name, reason=reason if was_alive else "lost")
        return loaded.report

    def _close(self, loaded: LoadedModel) -> None:
        if self._pool is None or self._machine.is_closing:
            loaded.close()
        else:
            self._pool._close(loaded, self._machine.footprint(loaded))

    def _sleep(self, loaded: LoadedModel) -> bool:
        """Let the model sleep, or log why it cannot."""
        try:
            loaded.measure()
            self._machine.last_footprint = self._machine.footprint(loaded)
            reason = loaded.sleep()
        except Exception as error:
            # The process has ended, or its pipe is broken.
            reason = repr_of(error)
        if reason and reason != self._cannot_sleep:
            log(WARNING, "%s cannot sleep and is unloaded instead: %s", self.name, reason)
        self._cannot_sleep = reason
        return not reason

    def _empty(
        self,
        reason: str,
        leases_until: float,
        others_until: float,
        sleeps: bool = False,
        swap: Load | None = None,
    ) -> CleanupReport | None:
        """Unload the model, or let it sleep; None if it is so already.

        Args:
            reason: Why, for metrics.
            leases_until: Until when to wait for leases, by `time.monotonic`.
            others_until: Until when to wait for a load or an unload under way.
            sleeps: Whether it is to sleep, if it can.
            swap: The replacement that needs it.

        Raises:
            ModelInUseError: The time is over, or this thread would wait for itself.
        """
        machine, me = self._machine, threading.get_ident()
        report: CleanupReport | None = None
        while True:
            if swap is not None:
                machine.ensure_wanted(swap)
            self._close_replaced()
            report = self._unload_if(lambda: not machine.leases, reason, sleeps) or report
            with CHANGED:
                transition, loaded = machine.transition, machine.loaded
                is_queued = self._pool is not None and machine.is_queued()
                if transition is None or is_queued:
                    is_done = loaded is None or (sleeps and loaded.is_asleep) or report is not None
                    needs_all = machine.is_closing or swap is not None
                    if is_done and not (needs_all and machine.is_in_use(swap)):
                        return report
                    if transition is None and loaded is not None and not machine.leases:
                        continue  # The state changed in between.
                waits_for_lease = transition is None and bool(machine.leases)
                left = (leases_until if waits_for_lease else others_until) - time.monotonic()
                is_own = machine.is_held_by(me) or (swap is None and machine.is_changed_by(me))
                if left <= 0 or is_queued or is_own:
                    raise machine.in_use()
                CHANGED.wait(min(left, LONGEST_WAIT_S))

    def _drain(self, until: float) -> CleanupReport:
        """Unload the model when its leases have ended, before any later lease."""
        with self._machine.draining():
            return self._empty("requested", until, math.inf) or CleanupReport()

    def _release(self) -> None:
        if "_machine" not in self.__dict__:  # Its __init__ has failed.
            return
        self._machine.stop_lending()
        if not is_shutting_down():
            ends = time.monotonic() + CLOSE_S if self._closes_by is None else self._closes_by
            self._empty("closed", ends, ends)
            return
        ends = REGISTRY.exit_ends
        try:
            self._empty("closed", ends - EXIT_WAIT_S + LEASES_AT_EXIT_S, ends)
        except ModelInUseError:
            # A thread or process that still loads ends with the program.
            self._unload_if(lambda: True, "closed")
            self._close_replaced(even_if_leased=True)

    # Pools and forks

    def _join(self, pool: Any, is_pinned: bool) -> None:
        """Join a `ModelPool` before the first use: load only what it admits."""
        self._pool, self._is_pinned = pool, is_pinned

    def _start_over_in_child(self) -> None:
        """In a forked child: forget the parent's model without running destructors."""
        machine = self._machine
        kept = machine.loaded, machine.replaced, machine.leases, machine.waiting, machine.unloaded
        _OF_PARENTS.append((kept, self._expiry))
        machine.start_over(is_closing=self.closed)
        self._expiry = Expiry(self)

    @early_bound
    def __del__(self) -> None:
        machine = self.__dict__.get("_machine")
        if machine is not None:  # A lease refers to its host, so both are garbage.
            machine.leases.clear()
        super().__del__()

    def __repr__(self) -> str:
        machine = self._machine
        return f"<ModelHost {self.name!r}, {machine.state}, {len(machine.leases)} leases>"


def _wait_at_exit(work: Future[Any]) -> None:
    """Wait for a thread that may run torch, which could not go on while the process ends."""
    wait_in_thread(work, REGISTRY.exit_left_s())


def _seconds_until(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


HOSTS: weakref.WeakValueDictionary[int, ModelHost[Any]] = weakref.WeakValueDictionary()
"""All hosts of this process by their ids, including those of pools."""
_OF_PARENTS: list[object] = []


def _after_fork() -> None:
    CHANGED.start_over()
    for host in list(HOSTS.values()):
        if not is_shutting_down():
            host._start_over_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
