"""ModelHost: a model that is loaded when it is needed, lent, and given back when it is idle."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from torch_utils._registry import REGISTRY, Entry
from torch_utils._runtime import is_shutting_down
from torch_utils.hosting.attempt import Limits
from torch_utils.hosting.closing import Lender
from torch_utils.hosting.core import Core
from torch_utils.hosting.keep_alive import parse_keep_alive
from torch_utils.hosting.lease import AsyncLease, Lease
from torch_utils.hosting.process import pickled_load
from torch_utils.hosting.tenancy import HostStatus
from torch_utils.hosting.tenants import ProcessTenant, Tenant, ThreadTenant
from torch_utils.report import CleanupReport
from torch_utils.resource import closes_on_error

__all__ = ["HostStatus", "ModelHost"]

M = TypeVar("M")
Isolation = Literal["thread", "process"]


class ModelHost(Lender, Generic[M]):
    """Loads a model when it is first wanted, lends it, and gives it back when it is idle.

    ::

        host = ModelHost(load_model, keep_alive="5m")
        with host.lease() as model:
            model.encode(texts)

    However many ask at once, it is loaded once, by the first of them; those who wait get the
    error if that fails, and the next lease tries again. It is never unloaded under a lease.
    Closed at exit at the latest. A fork has a host that is not loaded: it neither uses nor
    closes its parent's model, and may load one of its own.

    Threads: one timer for all hosts of the process, a daemon, while an idle model waits for its
    end; one for the time of a load or unload that a coroutine asks for. None otherwise.

    Args:
        load: Returns the model. Is called in the thread that first wants it.
        name: What messages call it; by default the function's name.
        keep_alive: How long an idle model is kept: seconds, "90s", "10m", "1h", 0 (it goes when
            the last lease ends), or -1 (for ever). The clock starts when the last lease ends.
        isolation: "thread" for a model in this process. "process" for one in a process of its
            own, of which a lease is a proxy (see `torch_utils.hosting.proxy.Proxy`); unloading
            ends that process, so that everything comes back. ``load`` must be importable then.

    Raises:
        TypeError: ``load`` cannot be called, or not in another process, or is a coroutine
            function; or ``name`` or ``keep_alive`` is of another kind.
        ValueError: ``keep_alive`` or ``isolation`` is none of its values.
    """

    @closes_on_error
    def __init__(
        self,
        load: Callable[[], M],
        *,
        name: str | None = None,
        keep_alive: float | str = "5m",
        isolation: Isolation = "thread",
    ) -> None:
        if not callable(load) or inspect.iscoroutinefunction(load):
            raise TypeError(f"load must be a function that returns the model, not {load!r}")
        if isolation not in ("thread", "process"):
            raise ValueError(f'isolation must be "thread" or "process", not {isolation!r}')
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a text, not {name!r}")
        self.name = name or _name_of(load)
        self.isolation = isolation
        self._keep_alive_s = parse_keep_alive(keep_alive)
        make: Callable[[], Tenant]
        if isolation == "thread":
            make = partial(ThreadTenant, self.name, load)
        else:
            make = partial(ProcessTenant, self.name, pickled_load(load))
        self._make = make
        self._limits: Limits | None = None
        self._core = self._new_core()
        _HOSTS.add(self)

    def lease(self, timeout_s: float | None = None) -> Lease[M]:
        """Return what lends the model for the length of a ``with`` block.

        Args:
            timeout_s: How long to wait for others who load or unload it; a load that the caller
                does itself takes as long as it takes.

        Raises:
            TypeError: ``timeout_s`` is no number. At once; the others come on entering.
            TimeoutError: The time is over.
            ResourceClosedError: The host is closed.
            TorchUtilsError: The lease was entered before; or this thread is just loading the
                model, unloading it, or (`ModelInUseError`) lending it, and would wait for itself.
            Exception: What ``load`` raised, in this thread or in the one that was waited for.
        """
        return Lease(self, self._own_core(), timeout_s, sys._getframe(1))

    def alease(self, timeout_s: float | None = None) -> AsyncLease[M]:
        """Return what lends the model for the length of an ``async with`` block.

        The event loop goes on meanwhile: the model is loaded in a thread. A coroutine that is
        cancelled leaves no lease behind; the load goes on. With ``isolation="process"`` calls
        still wait for their results: make them by `asyncio.to_thread`.

        Args:
            timeout_s: How long to wait, for the load too.

        Raises:
            TimeoutError: The time is over, of the load too. The others are those of `lease`.
        """
        return AsyncLease(self, self._own_core(), timeout_s, sys._getframe(1))

    def load(self) -> bool:
        """Load the model now rather than with the first lease.

        Returns:
            True if this call loaded it, False if it was there or somebody else did.

        Raises:
            ResourceClosedError: The host is closed.
            Exception: What ``load`` raised, in this thread or in the one that was waited for.
        """
        return self._own_core().load_now()

    def unload(self) -> CleanupReport:
        """Give the model back; the next lease loads it again.

        Waits for a load or unload that is under way.

        Returns:
            What was freed; nothing, if it was not loaded.

        Raises:
            ModelInUseError: It is lent. Says where the leases were taken.
            ResourceClosedError: The host is closed, which has given it back.
        """
        self.ensure_open()
        return self._own_core().unload()

    def status(self) -> HostStatus:
        """Describe this moment. Loads nothing, waits for nothing."""
        return self._own_core().status()

    def _release(self) -> None:
        core = self.__dict__.get("_core")
        if core is not None and core.pid == os.getpid():
            core.shut(self._waits_s)

    def join(self, limits: Limits) -> None:
        """Have it loaded only if there is room; for a pool, before it is first used."""
        self._limits = self._core.limits = limits

    @property
    def core(self) -> Core:
        """The bookkeeping of this process, for a pool."""
        return self._own_core()

    def _own_core(self) -> Core:
        """Return the bookkeeping of this process."""
        core = self._core
        if not _is_registered(self) and not self.closed:
            # The parent's entry is not this process's to close.
            release = type(self)._release
            REGISTRY.add(Entry(id(self), type(self).__name__, weakref.ref(self), release))
        return core

    def _start_over(self) -> None:
        """Be the host of a fork, in which nothing is loaded."""
        _OF_PARENTS.append(self._core)
        if self._limits is not None:
            self._limits.start_over()
        self._core = self._new_core()

    def _new_core(self) -> Core:
        return Core(self.name, self._make, self._keep_alive_s, limits=self._limits)

    def __repr__(self) -> str:
        status = self._core.status()
        return f"<ModelHost {self.name!r}, {status.state}, {status.leases} leases>"


def _is_registered(host: ModelHost[Any]) -> bool:
    entry = REGISTRY.get(id(host))
    return entry is None or entry.pid == os.getpid()


def _name_of(load: Any) -> str:
    while isinstance(load, partial):
        load = load.func
    name = getattr(load, "__qualname__", None) or type(load).__qualname__
    return str(name)


_HOSTS: weakref.WeakSet[ModelHost[Any]] = weakref.WeakSet()
_OF_PARENTS: list[Core] = []  # A fork must not run the destructors of its parent's models.


def _after_fork() -> None:
    for host in list(_HOSTS):
        if not is_shutting_down():
            host._start_over()


os.register_at_fork(after_in_child=_after_fork)
