"""ModelPool: hosts that share a budget of memory."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from torch_utils._report import CleanupReport, format_bytes
from torch_utils._resource import closes_on_error
from torch_utils._runtime import is_shutting_down
from torch_utils.errors import ModelInUseError, NoRoomError, UnknownModelError
from torch_utils.hosting.arguments import Devices, check_positive, parse_keep_alive, parse_sizes
from torch_utils.hosting.host import LONGEST_WAIT_S, HostStatus, ModelHost, Sizes, Transition
from torch_utils.hosting.lease import AsyncLease, Lease, ModelLender, call_in_thread

__all__ = ["ModelPool"]

M = TypeVar("M")
T = TypeVar("T")


class ModelPool(ModelLender):
    """Lend several models, and keep only as many loaded as fit into the budget.

    ::

        pool = ModelPool(budget_bytes=4 << 30)
        pool.add("small", load_small)
        pool.add("large", load_large, isolation="process")
        with pool.lease("small", timeout_s=30) as model:
            model.encode(texts)

    Before a load, the pool evicts idle models, the least recently used first, until the new one
    fits. A model is never evicted while it is leased. Its size is the one that `add` declares.
    Otherwise it is the size of its tensors and arrays or, for a model in its own process, the
    resident memory of that process. It is then known only after the first load, which may exceed
    the budget; the pool evicts others or unloads it again. Memory outside of tensors and arrays
    does not count unless the size is declared.

    Threads: safe. A load waits for room in its own thread. Threads that wait for room while they
    hold a lease can deadlock; pass them a ``timeout_s``. Closing the pool closes its hosts. In a
    forked child the pool has the same hosts, none of them loaded.

    Args:
        budget_bytes: Bytes for all models together, or by "host" and device ("cuda:0"). None for
            no limit.
        max_loaded: Number of models that may be loaded together. None for no limit.
        keep_alive: The keep-alive time of models that `add` gives none; see `ModelHost`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A limit is not positive, or ``keep_alive`` is invalid.
    """

    @closes_on_error
    def __init__(
        self,
        *,
        budget_bytes: Devices | None = None,
        max_loaded: int | None = None,
        keep_alive: float | str = "5m",
    ) -> None:
        self._changed = threading.Condition()  # also the lock of all its hosts
        self._hosts: dict[str, ModelHost[Any]] = {}
        self._measured: dict[str, Sizes] = {}  # by name, at the last load
        self._budgets = (
            {} if budget_bytes is None else parse_sizes("budget_bytes", budget_bytes, "")
        )
        if max_loaded is not None:
            check_positive("max_loaded", max_loaded)
        self._max_loaded = max_loaded
        parse_keep_alive(keep_alive)
        self._keep_alive = keep_alive
        _POOLS.add(self)

    def add(self, name: str, load: Callable[[], M], **options: Any) -> ModelHost[M]:
        """Add a model, without loading it.

        Args:
            name: Its name in the pool.
            load: Returns the model.
            **options: The options of `ModelHost`: ``keep_alive`` (by default the pool's),
                ``isolation``, ``nbytes``, ``max_leases``, ``call_timeout_s``, ``environment``.

        Returns:
            The model's host. Leases of the host count as leases of the pool.

        Raises:
            TypeError: An argument has the wrong type; see `ModelHost`.
            ValueError: The pool has a model of this name, or an argument is invalid.
            ResourceClosedError: The pool is closed.
        """
        with self._changed:
            self.ensure_open()
            if name in self._hosts:
                raise ValueError(f"this pool has a model {name!r} already; choose another name")
            host = ModelHost(load, name=name, **{"keep_alive": self._keep_alive, **options})
            host.join(self._changed, self._admit, bool(self._budgets))
            self._hosts[name] = host
            return host

    def remove(self, name: str) -> CleanupReport:
        """Unload a model and close its host, and forget both.

        Args:
            name: Its name in the pool.

        Returns:
            The report of the release.

        Raises:
            UnknownModelError: The pool has no model of this name.
            ModelInUseError: The model is leased. The pool keeps it.
        """
        host = self._host(name)
        report = CleanupReport() if host.closed else host.unload()
        host.close()
        if host.state != "closed":
            raise host.in_use()
        with self._changed:
            self._hosts.pop(name, None)
            self._measured.pop(name, None)
        return report

    def __contains__(self, name: object) -> bool:
        return name in self._hosts

    def lease(self, name: str, timeout_s: float | None = None) -> Lease[Any]:
        """Return a context manager that lends a model; see `ModelHost.lease`.

        Args:
            name: Its name in the pool.
            timeout_s: Seconds to wait for room, and for other threads that load or unload the
                model. None for no limit.

        Raises:
            UnknownModelError: The pool has no model of this name.
            NoRoomError: The model did not fit in time, or can never fit. Entering the block
                raises it, like the exceptions of `ModelHost.lease`.
        """
        return Lease(self._host(name), timeout_s, sys._getframe(1))

    def alease(self, name: str, timeout_s: float | None = None) -> AsyncLease[Any]:
        """Return a context manager that lends a model for an ``async with`` block.

        See `lease` and `ModelHost.alease`.
        """
        return AsyncLease(self._host(name), timeout_s, sys._getframe(1))

    def call(
        self, name: str, function: Callable[[Any], T], *, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, T]:
        """Lease a model, and call ``function(model)`` in a new thread; see `ModelHost.call`.

        Args:
            name: Its name in the pool.
            function: The function.
            timeout_s: As for `alease`.

        Returns:
            A coroutine that returns what the function returns.
        """
        return call_in_thread(AsyncLease(self._host(name), timeout_s, sys._getframe(1)), function)

    def unload(self, name: str) -> CleanupReport:
        """Unload one model; see `ModelHost.unload`.

        Args:
            name: Its name in the pool.

        Returns:
            The report of the release.

        Raises:
            UnknownModelError: The pool has no model of this name.
        """
        return self._host(name).unload()

    def status(self) -> dict[str, HostStatus]:
        """Return the state of each model by name, in the order of `add`."""
        return {name: host.status() for name, host in list(self._hosts.items())}

    def _release(self) -> None:
        hosts = list(self._hosts.values())[::-1]
        for host in hosts:  # First all of them, so that none lends while another waits.
            host.stop_lending()
        ends = self._close_deadline()
        errors: list[BaseException] = []
        for host in hosts:
            try:
                host.close(max(0.0, ends - time.monotonic()))
            except BaseException as error:  # Close the others first.
                errors.append(error)
        if errors:
            others = [error for error in errors if not isinstance(error, ModelInUseError)]
            raise others[0] if others else ModelInUseError("; ".join(map(str, errors)))

    def _host(self, name: str) -> ModelHost[Any]:
        try:
            return self._hosts[name]
        except KeyError:
            known = ", ".join(map(repr, self._hosts)) or "none"
            raise UnknownModelError(f"this pool has no model {name!r}; it has: {known}") from None

    def _admit(
        self,
        host: ModelHost[Any],
        transition: Transition,
        sizes: Sizes | None,
        deadline: float | None,
    ) -> None:
        """Evict idle models until a load fits, and wait for leases to end if necessary.

        Args:
            host: The host that loads.
            transition: Its load, which records the admitted bytes.
            sizes: The model's bytes by device; None before the load, for those of the last load.
            deadline: When to give up, by `time.monotonic`; None for never.

        Raises:
            NoRoomError: The deadline has passed, or the model can never fit. The message names
                what holds the memory.
            ResourceClosedError: The host was closed meanwhile.
        """
        is_loaded = transition.admitted is not None
        if sizes is None:
            sizes = self._measured.get(host.name, {})
        else:
            self._measured[host.name] = sizes
        while True:
            with self._changed:
                host.ensure_lending()
                others = [other for other in self._hosts.values() if other is not host]
                used = [taken for other in others if (taken := other.used()) is not None]
                lacking = self._lacking([sizes, *used])
                if not lacking:
                    transition.admitted, transition.no_room = sizes, ""
                    return
                never_fits = bool(self._lacking([sizes]))
                idle = [other for other in others if other.is_idle()]
                if never_fits or not idle:
                    transition.no_room = _explain(host, sizes, lacking, others)
                    left = LONGEST_WAIT_S if deadline is None else deadline - time.monotonic()
                    # Of two loads that need more than they were admitted for, one gives up.
                    is_stuck = is_loaded and any(other.waits_for_room() for other in others)
                    if never_fits or is_stuck or left <= 0 or _waits_for_itself(transition, others):
                        raise NoRoomError(transition.no_room)
                    self._changed.wait(min(left, LONGEST_WAIT_S))
                    continue
                oldest = min(idle, key=lambda other: other.idle_since)
            oldest.unload_if(oldest.is_idle, "evicted")

    def _lacking(self, sizes: list[Sizes]) -> str:
        """Return the limit that the sizes exceed together; empty if they fit."""
        if self._max_loaded is not None and len(sizes) > self._max_loaded:
            return f"at most {self._max_loaded} may be loaded"
        for device, budget in self._budgets.items():
            used = sum(n for one in sizes for name, n in one.items() if device in ("", name))
            if used > budget:
                on = f" on {device}" if device else ""
                return f"the budget is {format_bytes(budget)}{on}"
        return ""

    def renew_lock(self) -> None:
        """Replace the lock: a thread that a fork or the teardown has ended may hold it."""
        self._changed = threading.Condition()
        for host in self._hosts.values():
            host.join(self._changed, self._admit, bool(self._budgets))


def _waits_for_itself(transition: Transition, others: list[ModelHost[Any]]) -> bool:
    """Return whether the waiting thread itself holds everything that takes the room."""
    return all(
        other.used() is None or other.holder_threads() == {transition.thread} for other in others
    )


def _explain(host: ModelHost[Any], sizes: Sizes, lacking: str, others: list[ModelHost[Any]]) -> str:
    held = []
    for other in others:
        used = other.used()
        if used is not None:
            why = str(other.in_use()).removeprefix(f"{other.name} ")
            held.append(f"{other.name} has {format_bytes(sum(used.values()))} ({why})")
    needs = f", and it needs {format_bytes(sum(sizes.values()))}" if sizes else ""
    return f"no room for {host.name}: {lacking}{needs}; {'; '.join(held) or 'nothing is loaded'}"


_POOLS: weakref.WeakSet[ModelPool] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_POOLS):
        if not is_shutting_down():
            pool.renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
