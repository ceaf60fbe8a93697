"""ModelHost: loads a model on demand, lends it, and lets it sleep or unloads it when it is idle.

`torch_utils.hosting.tenancy` has the states and what changes them. Here is what the threads do in
between: they load, wake, let sleep, unload, wait for the end of the keep-alive time, and close.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from torch_utils._oom import clear_exception_frames, is_out_of_memory
from torch_utils._report import CleanupReport
from torch_utils._resource import closes_on_error
from torch_utils._runtime import early_bound, is_shutting_down, log, notify
from torch_utils._signals import DeferredSignals
from torch_utils.errors import ModelInUseError, NoRoomError, repr_of
from torch_utils.hosting import arguments
from torch_utils.hosting.blocks import by_device
from torch_utils.hosting.lease import CLOSE_S, AsyncLease, Lease, ModelLender
from torch_utils.hosting.process import ModelProcess, pickled_load
from torch_utils.hosting.tenancy import Holder, HostStatus, State, Tenancy, Transition
from torch_utils.hosting.tenant import WARNING, Tenant, ThreadTenant
from torch_utils.hosting.threads import LONGEST_WAIT_S, Expiry, in_thread, wait_in_loop

__all__ = ["HostStatus", "ModelHost"]

M = TypeVar("M")
T = TypeVar("T")

LOAD_AT_EXIT_S, LEASES_AT_EXIT_S = 5.0, 1.0
"""How long the exit callback waits for a load, and for leases of other threads, in seconds."""


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
        is_model = callable(getattr(type(load), "forward", None))  # An nn.Module is callable.
        if not callable(load) or is_model or inspect.iscoroutinefunction(load):
            raise TypeError(f"load must be a plain function that returns the model, got {load!r}")
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
        self._sleeps = idle == "sleep"
        self._cannot_sleep = ""  # Why it last could not sleep: the log has it once.
        sizes = {} if nbytes is None else arguments.parse_sizes("nbytes", nbytes, "host")
        self._new_tenant: Callable[[], Tenant] = partial(ThreadTenant, self.name, load)
        if isolation == "process":
            how = pickled_load(load), self.name, environment, call_timeout_s
            self._new_tenant = partial(ModelProcess, *how)
        self._pool: Any = None
        keep_alive_s = arguments.parse_keep_alive(keep_alive)
        self.tenancy: Tenancy = Tenancy(self.name, keep_alive_s, max_leases, sizes)
        self.expiry: Expiry = Expiry(self)
        HOSTS[id(self)] = self

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

    def unload(self) -> CleanupReport:
        """Unload the model; the next lease loads it again.

        It waits for a load that is under way, unless that waits for room in a pool.

        Returns:
            The report of the release; an empty one if the model was not loaded. Its ``errors`` say
            if the model could only be dropped.

        Raises:
            ModelInUseError: The model is leased. The message names each lease.
            ResourceClosedError: The host is closed.
        """
        self.ensure_open()
        return self._empty("requested", 0.0, math.inf) or CleanupReport()

    def status(self) -> HostStatus:
        """Return the current state. Never loads the model, and never waits."""
        tenancy, now, state = self.tenancy, time.monotonic(), self.state
        tenant = tenancy.tenant
        is_idle = state == "loaded" and not tenancy.leases
        expires_in_s = max(0.0, tenancy.expires_at() - now)
        sizes = {}
        if tenant is not None and state != "unloaded":
            tenancy.measure()
            sizes = by_device(tenancy.blocks(tenant))
        return HostStatus(
            name=self.name,
            state=state,
            leases=len(tenancy.leases),
            loads=tenancy.loads,
            unloads=tenancy.unloads,
            nbytes=sum(sizes.values()),
            nbytes_by_device=sizes,
            idle_s=max(0.0, now - tenancy.idle_since) if is_idle else None,
            expires_in_s=expires_in_s if is_idle and expires_in_s < math.inf else None,
            last_error=tenancy.last_error,
        )

    @property
    def state(self) -> State:
        """The state, as in `status`; "unloaded" also if the model is lost."""
        return self.tenancy.state

    # Leases

    def acquire(self, holder: Holder | None, timeout_s: float | None) -> tuple[Tenant, bool]:
        """Lend the model to ``holder``; load it in this thread unless another one does.

        A process is started in the background if the wait is limited.

        Returns:
            The tenant, and whether this call loaded it.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        in_background = deadline is not None and self.isolation == "process"
        has_loaded = False
        while True:
            found = self._try(holder, deadline, in_background)
            if not isinstance(found, Transition):
                return found, has_loaded
            has_loaded |= found.thread == threading.get_ident()
            concurrent.futures.wait([found], _seconds_until(deadline))
            self._check_waited(found, timeout_s)

    async def aacquire(self, holder: Holder, timeout_s: float | None) -> Tenant:
        """Lend the model to ``holder``; a thread loads it if no other caller does."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            found = self._try(holder, None, in_background=True)
            if not isinstance(found, Transition):
                return found
            await wait_in_loop(found, _seconds_until(deadline))
            self._check_waited(found, timeout_s)

    def _try(
        self, holder: Holder | None, deadline: float | None, in_background: bool
    ) -> Tenant | Transition:
        """Lend the model, or return the transition to wait for: a load that this call began."""
        if self.tenancy.is_lost():
            self.unload_if(self.tenancy.is_lost, "lost")
        own = Transition("loading", in_background)
        try:
            found = self.tenancy.lend(holder, own)
            if found is own and in_background:
                in_thread(partial(self._load, own, None))
            elif found is own:
                self._load(own, deadline)
            return found
        except BaseException:  # An interrupt may have come before the load.
            self.tenancy.fail(own, None)
            raise

    def _check_waited(self, transition: Transition, timeout_s: float | None) -> None:
        """Raise the exception of a transition, or an error if the time is over."""
        if transition.done():
            return transition.result()
        if transition.no_room:
            raise NoRoomError(transition.no_room)
        still = f"{self.name} is still {transition.state}"
        raise TimeoutError(f"{still} after {timeout_s} s; pass a larger timeout_s")

    # Loading

    def _load(self, transition: Transition, deadline: float | None) -> None:
        """Load or wake the model, which the transition has for this thread, if a pool admits it."""
        transition.thread = threading.get_ident()
        tenancy = self.tenancy
        tenant, began = tenancy.tenant or self._new_tenant(), time.monotonic()
        wakes = tenant.is_asleep
        self.register_in_child()
        try:
            if self._pool is not None:
                self._pool.admit(self, transition, tenancy.expected(), deadline)
                began = time.monotonic()
            self._make(tenant)
            if not wakes:
                tenancy.last_blocks = tenancy.blocks(tenant)
                self._warn_if_unknown(tenant)
                if self._pool is not None:
                    self._pool.admit(self, transition, tenancy.last_blocks, deadline)
            tenancy.arrive(transition, tenant)
            self.expiry.start(tenancy)
        except BaseException as error:
            if isinstance(error, Exception):
                clear_exception_frames(error)  # They would keep a partly loaded model alive.
            try:
                if tenancy.tenant is not tenant:
                    tenant.close()
            finally:
                if tenancy.fail(transition, error) and not wakes:
                    self._notify_load("error", began)
            raise
        if not wakes:
            self._notify_load("success", began)

    def _notify_load(self, outcome: str, began: float) -> None:
        notify("load", model=self.name, outcome=outcome, duration_s=time.monotonic() - began)

    def _make(self, tenant: Tenant) -> None:
        """Load or wake the model; if memory runs out, let the pool make room, and try once more."""
        wakes = tenant.is_asleep
        for is_last in (False, True):
            try:
                tenant.wake() if wakes else tenant.load()
                return
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                clear_exception_frames(error)
                if is_last or self._pool is None or not self._pool.evict_idle(self):
                    if not wakes:
                        raise
                    what = f"no room to wake {self.name}; it is still asleep: {error}"
                    raise NoRoomError(what) from None

    def _warn_if_unknown(self, tenant: Tenant) -> None:
        """Log if the model is not measured, and a pool or the unload needs to know it."""
        can_close = hasattr(type(getattr(tenant, "model", tenant)), "close")
        needs_size = self._pool is not None and self._pool.has_budget
        if not self.tenancy.last_blocks and (needs_size or not can_close):
            what = "%s holds no tensors or arrays that can be counted; declare nbytes=, and return "
            log(WARNING, what + "an object with close()", self.name)

    # Sleeping and unloading

    def unload_if_due(self) -> None:
        """Unload the model, or let it sleep, if its keep-alive time is over."""
        tenancy = self.tenancy
        if tenancy.is_due():
            reason = "closed" if tenancy.is_closing else "idle"
            self.unload_if(tenancy.is_due, reason, self._sleeps and not tenancy.is_closing)

    def unload_if(
        self, may: Callable[[], bool], reason: str, sleeps: bool = False
    ) -> CleanupReport | None:
        """Unload the model if ``may()`` returns True; None if there was no unload.

        Args:
            may: Called under the lock.
            reason: Why, for metrics.
            sleeps: Whether it is to sleep instead, if it can.
        """
        departure = Transition("sleeping" if sleeps else "unloading")
        with DeferredSignals():
            tenant = self.tenancy.depart(departure, may)
            if tenant is None:
                return None
            was_alive = tenant.is_alive()
            is_asleep = False
            try:
                is_asleep = sleeps and was_alive and self._sleep(tenant)
                if not is_asleep:
                    tenant.close()
            finally:
                self.tenancy.leave(departure, is_asleep)
                self.expiry.dropped.put(None)  # Ends the expiry thread.
            if not is_asleep:
                notify("unload", model=self.name, reason=reason if was_alive else "lost")
        return tenant.report

    def _sleep(self, tenant: Tenant) -> bool:
        """Let the model sleep, or log why it cannot."""
        try:
            tenant.measure()
            self.tenancy.last_blocks = self.tenancy.blocks(tenant)
            reason = tenant.sleep()
        except Exception as error:
            # The process has ended, or its pipe is broken.
            reason = repr_of(error)
        if reason and reason != self._cannot_sleep:
            log(WARNING, "%s cannot sleep and is unloaded instead: %s", self.name, reason)
        self._cannot_sleep = reason
        return not reason

    def _empty(
        self, reason: str, leases_until: float, others_until: float, sleeps: bool = False
    ) -> CleanupReport | None:
        """Unload the model, or let it sleep; None if it is so already.

        Args:
            reason: Why, for metrics.
            leases_until: Until when to wait for leases, by `time.monotonic`.
            others_until: Until when to wait for a load or an unload under way.
            sleeps: Whether it is to sleep, if it can.

        Raises:
            ModelInUseError: The time is over, or this thread would wait for itself.
        """
        tenancy = self.tenancy
        while True:
            report = self.unload_if(lambda: not tenancy.leases, reason, sleeps)
            if report is not None:
                return report
            with tenancy.changed:
                transition, tenant = tenancy.transition, tenancy.tenant
                is_queued = self._pool is not None and tenancy.is_queued()
                if transition is None or is_queued:
                    if tenant is None or (sleeps and tenant.is_asleep):
                        return None
                    if transition is None and not tenancy.leases:
                        continue  # The state changed in between.
                left = (leases_until if transition is None else others_until) - time.monotonic()
                if left <= 0 or is_queued or tenancy.threads() == {threading.get_ident()}:
                    raise tenancy.in_use()
                tenancy.changed.wait(min(left, LONGEST_WAIT_S))

    def _release(self) -> None:
        if "tenancy" not in self.__dict__:  # Its __init__ has failed.
            return
        self.tenancy.stop_lending()
        now = time.monotonic()
        if not is_shutting_down():
            ends = now + CLOSE_S if self.closes_by is None else self.closes_by
            self._empty("closed", ends, ends)
            return
        try:
            self._empty("closed", now + LEASES_AT_EXIT_S, now + LOAD_AT_EXIT_S)
        except ModelInUseError:
            # A thread or process that still loads ends with the program.
            self.unload_if(lambda: True, "closed")

    # Pools and forks

    def join(self, pool: Any) -> None:
        """Join a `ModelPool` before the first use: share its lock, and load only what it admits."""
        self._pool, self.tenancy.changed = pool, pool.changed

    def start_over_in_child(self) -> None:
        """In a forked child: forget the parent's model without running destructors."""
        tenancy = self.tenancy
        _OF_PARENTS.append((tenancy.tenant, tenancy.leases, self.expiry, tenancy.unloaded))
        tenancy.start_over(is_closing=self.closed)
        self.expiry = Expiry(self)

    @early_bound
    def __del__(self) -> None:
        tenancy = self.__dict__.get("tenancy")
        if tenancy is not None:  # A lease refers to its host, so both are garbage.
            tenancy.leases.clear()
        super().__del__()

    def __repr__(self) -> str:
        tenancy = self.tenancy
        return f"<ModelHost {self.name!r}, {tenancy.state}, {len(tenancy.leases)} leases>"


def _seconds_until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


HOSTS: weakref.WeakValueDictionary[int, ModelHost[Any]] = weakref.WeakValueDictionary()
"""All hosts of this process by their ids, including those of pools."""
_OF_PARENTS: list[object] = []


def _after_fork() -> None:
    for host in list(HOSTS.values()):
        if not is_shutting_down():
            host.start_over_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
