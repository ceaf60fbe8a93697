"""ModelPool: several hosts that share a budget."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch_utils.errors import ModelInUseError
from torch_utils.hosting.closing import Lender
from torch_utils.hosting.core import Core
from torch_utils.hosting.host import ModelHost
from torch_utils.hosting.keep_alive import parse_keep_alive
from torch_utils.hosting.lease import AsyncLease, Lease
from torch_utils.hosting.room import Room
from torch_utils.hosting.tenancy import HostStatus
from torch_utils.report import CleanupReport
from torch_utils.resource import closes_on_error

__all__ = ["ModelPool"]

M = TypeVar("M")
_PLACE = re.compile(r"host|(?!cpu)[a-z]+:[0-9]+")


class ModelPool(Lender):
    """Lends several models, of which only so many are loaded as fit.

    ::

        pool = ModelPool(budget_bytes=4 << 30)
        pool.add("small", load_small)
        pool.add("large", load_large, isolation="process")
        with pool.lease("small", timeout_s=30) as model:
            model.encode(texts)

    Before a load, idle models are unloaded, the least recently used first, until it fits; one
    that is lent never is. What a model needs is what its last load was measured to add, to this
    process or to its own, on the host and on devices. The first load of a model cannot know it:
    that one may exceed the budget until it is there, is then made room for, or given back. A
    load that imports modules into this process counts with the model's tensors on the host; if
    it has none that can be counted, with all that was added, and the next load measures anew.

    Safe from several threads; each load waits for room in its own thread, or in that of the load
    that a coroutine has asked for. Closing it closes its hosts. A fork's pool has the same hosts,
    none of them loaded.

    Args:
        budget_bytes: For all together; or by "host" and device ("cuda:0"). None: no limit.
        max_loaded: How many models at once. None: no limit.
        keep_alive: For those that are added without one of their own; see `ModelHost`.

    Raises:
        TypeError: A limit or ``keep_alive`` is of another kind.
        ValueError: A limit is not positive, or ``keep_alive`` none of its values.
    """

    @closes_on_error
    def __init__(
        self,
        *,
        budget_bytes: int | Mapping[str, int] | None = None,
        max_loaded: int | None = None,
        keep_alive: float | str = "5m",
    ) -> None:
        limits: Mapping[str, int] = {}
        if isinstance(budget_bytes, Mapping):
            limits = budget_bytes
            if not limits or not all(isinstance(p, str) and _PLACE.fullmatch(p) for p in limits):
                what = 'bytes by "host" and device ("cuda:0")'
                raise ValueError(f"budget_bytes is {what}, not {dict(limits)!r}")
        elif budget_bytes is not None:
            limits = {"": budget_bytes}
        for place, limit in limits.items():
            _check_positive(f"budget_bytes[{place!r}]" if place else "budget_bytes", limit)
        if max_loaded is not None:
            _check_positive("max_loaded", max_loaded)
        parse_keep_alive(keep_alive)
        self._keep_alive = keep_alive
        self._hosts: dict[str, ModelHost[Any]] = {}
        self._lock = threading.Lock()
        self._room = Room(limits, max_loaded, self._cores)

    def _cores(self) -> list[Core]:
        return [host.core for host in list(self._hosts.values())]

    def add(self, name: str, load: Callable[[], M], **options: Any) -> ModelHost[M]:
        """Add a model, without loading it.

        Args:
            name: What it is asked for by.
            load: Returns the model.
            **options: As for `ModelHost`: ``keep_alive``, ``isolation``.

        Returns:
            Its host, whose leases are the same as the pool's.

        Raises:
            ValueError: There is one of this name. More, and TypeErrors: see `ModelHost`.
            ResourceClosedError: The pool is closed.
        """
        with self._lock:
            self.ensure_open()
            if name in self._hosts:
                raise ValueError(f"this pool has a model {name!r} already")
            options = {"keep_alive": self._keep_alive, **options}
            host = ModelHost(load, name=name, **options)
            host.join(self._room)
            self._hosts[name] = host
            return host

    def lease(self, name: str, timeout_s: float | None = None) -> Lease[Any]:
        """Return what lends a model for the length of a ``with`` block; see `ModelHost.lease`.

        Args:
            name: Which.
            timeout_s: How long to wait for room, and for others who load or unload it.

        Raises:
            KeyError: No model has this name.
            NoRoomError: No room could be made in time, or ever. On entering, like those of
                `ModelHost.lease`.
        """
        host = self._host(name)
        return Lease(host, host.core, timeout_s, sys._getframe(1))

    def alease(self, name: str, timeout_s: float | None = None) -> AsyncLease[Any]:
        """Return what lends a model for the length of an ``async with`` block.

        See `lease`, and `ModelHost.alease`.
        """
        host = self._host(name)
        return AsyncLease(host, host.core, timeout_s, sys._getframe(1))

    def unload(self, name: str) -> CleanupReport:
        """Give one model back; see `ModelHost.unload`.

        Raises:
            KeyError: No model has this name.
        """
        return self._host(name).unload()

    def status(self) -> dict[str, HostStatus]:
        """Describe this moment, by name, in the order in which they were added. Loads nothing."""
        return {name: host.status() for name, host in list(self._hosts.items())}

    def _release(self) -> None:
        hosts = list(self.__dict__.get("_hosts", {}).values())[::-1]
        errors = []
        # All of them first: while one waits for its leases, the others would go on lending.
        for host in hosts:
            try:
                host.core.lend_no_more()
            except ModelInUseError as error:
                errors.append(error)
        ends = time.monotonic() + self._waits_s
        for host in hosts:
            try:
                host.close(max(0.0, ends - time.monotonic()))
            except ModelInUseError as error:
                errors.append(error)
        if errors:
            raise ModelInUseError("; ".join(map(str, errors)))

    def _host(self, name: str) -> ModelHost[Any]:
        try:
            return self._hosts[name]
        except KeyError:
            known = ", ".join(map(repr, self._hosts)) or "none"
            raise KeyError(f"this pool has no model {name!r}; it has: {known}") from None


def _check_positive(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number, not {value!r}")
    if value <= 0:
        raise ValueError(f"{what} must be positive, not {value!r}")
