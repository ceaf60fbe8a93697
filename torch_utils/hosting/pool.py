"""ModelPool: hosts that share a budget of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch_utils._memory import memory_snapshot
from torch_utils._report import CleanupReport, format_bytes
from torch_utils._resource import closes_on_error
from torch_utils.errors import ModelInUseError, NoRoomError, UnknownModelError
from torch_utils.hosting.arguments import Devices, check_positive, parse_keep_alive, parse_sizes
from torch_utils.hosting.blocks import ASLEEP, Blocks, awake_bytes, by_device
from torch_utils.hosting.host import ModelHost
from torch_utils.hosting.lease import CLOSE_S, AsyncLease, Lease, ModelLender
from torch_utils.hosting.tenancy import Changed, HostStatus, Transition
from torch_utils.hosting.threads import LONGEST_WAIT_S

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
    Otherwise it is the size of its tensors and arrays, measured again for each load, or, for a
    model in its own process, the memory of that process. It is then known only after the first
    load, which may exceed the budget; the pool evicts others or unloads it again. What two models
    share counts once, and what callers keep of an unloaded model still counts. Memory outside of
    tensors and arrays does not count unless the size is declared.

    What is evicted sleeps if ``sleep_bytes`` allows it: its values are in host memory, and the next
    lease wakes it; see `ModelHost`. The least recently used sleeper is unloaded first.

    Threads: safe. A load waits for room in its own thread. Threads that wait for room while they
    hold a lease can deadlock; pass them a ``timeout_s``. Closing the pool closes its hosts. In a
    forked child the pool has the same hosts, none of them loaded.

    Args:
        budget_bytes: Bytes for all models that are awake, or by "host" and device ("cuda:0"); a
            budget for the host counts sleepers too. "auto" for what the devices have: their free
            memory, and what torch's cache holds unused, without ``headroom_bytes``. Other
            processes on a device count. None for no limit.
        headroom_bytes: Bytes of each device that "auto" leaves for the work of the models. None
            for a tenth of the device.
        sleep_bytes: Bytes of host memory for models that sleep instead of being unloaded. "auto"
            for half of what is available at that time; 0 for none.
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
        budget_bytes: Devices | Literal["auto"] | None = None,
        headroom_bytes: int | None = None,
        sleep_bytes: int | Literal["auto"] = 0,
        max_loaded: int | None = None,
        keep_alive: float | str = "5m",
    ) -> None:
        self.changed: Changed = Changed()  # also the lock of all its hosts
        self._hosts: dict[str, ModelHost[Any]] = {}
        self._is_auto = budget_bytes == "auto"
        sizes: Any = None if self._is_auto else budget_bytes
        self._budgets = {} if sizes is None else parse_sizes("budget_bytes", sizes, "")
        self.has_budget: bool = budget_bytes is not None
        if headroom_bytes is not None:
            check_positive("headroom_bytes", headroom_bytes)
        if sleep_bytes not in ("auto", 0):
            check_positive("sleep_bytes", sleep_bytes)
        if max_loaded is not None:
            check_positive("max_loaded", max_loaded)
        self._headroom_bytes, self._sleep_bytes = headroom_bytes, sleep_bytes
        self._max_loaded = max_loaded
        parse_keep_alive(keep_alive)
        self._keep_alive = keep_alive

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
        with self.changed:
            self.ensure_open()
            if name in self._hosts:
                raise ValueError(f"this pool has a model {name!r} already; choose another name")
            host = ModelHost(load, name=name, **{"keep_alive": self._keep_alive, **options})
            host.join(self)
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
            raise host.tenancy.in_use()
        self._hosts.pop(name, None)
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
        return self._host(name).lease(timeout_s)

    def alease(self, name: str, timeout_s: float | None = None) -> AsyncLease[Any]:
        """Return a context manager that lends a model for an ``async with`` block.

        See `lease` and `ModelHost.alease`.
        """
        return self._host(name).alease(timeout_s)

    def call(
        self, name: str, function: Callable[[Any], T], *, timeout_s: float | None = None
    ) -> Coroutine[Any, Any, T]:
        """Lease a model, and call ``function(model)`` in a thread; see `ModelHost.call`.

        Args:
            name: Its name in the pool.
            function: The function.
            timeout_s: As for `alease`.

        Returns:
            A coroutine that returns what the function returns.
        """
        return self._host(name).call(function, timeout_s=timeout_s)

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
        # There are none if its __init__ has failed.
        hosts = list(self.__dict__.get("_hosts", {}).values())[::-1]
        for host in hosts:  # First all of them, so that none lends while another waits.
            host.tenancy.stop_lending()
        ends = time.monotonic() + CLOSE_S if self.closes_by is None else self.closes_by
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

    def admit(
        self,
        host: ModelHost[Any],
        transition: Transition,
        blocks: Blocks,
        deadline: float | None,
    ) -> None:
        """Evict idle models until a load fits, and wait for leases to end if necessary.

        Args:
            host: The host that loads.
            transition: Its load, which records the admitted memory.
            blocks: The model's memory: before the load, that of the last load, or what is declared.
            deadline: When to give up, by `time.monotonic`; None for never. A load in the
                background gives up when nobody waits for it.

        Raises:
            NoRoomError: There is no room in time, or the model can never fit. The message names
                what holds the memory.
            ResourceClosedError: The host was closed meanwhile.
        """
        is_loaded = transition.admitted is not None
        while True:
            for other in list(self._hosts.values()):
                other.tenancy.measure()
            with self.changed:
                host.tenancy.ensure_lending()
                others = [other for other in self._hosts.values() if other is not host]
                lacking = self._lacking(blocks, others, is_loaded)
                if not lacking:
                    transition.admitted, transition.is_made = blocks, is_loaded
                    transition.no_room = ""
                    return
                never_fits = bool(self._lacking(blocks, None))
                idle = [other for other in others if other.tenancy.is_idle()]
                if not idle:  # Sleepers have a part of the host's memory only.
                    idle = [other for other in others if other.tenancy.is_asleep()]
                    if self._lacking(blocks, [one for one in others if one not in idle], is_loaded):
                        idle = []
                if never_fits or not idle:
                    transition.no_room = _explain(host, blocks, lacking, others)
                    left = LONGEST_WAIT_S if deadline is None else deadline - time.monotonic()
                    if transition.in_background and not host.tenancy.waiting:
                        left = 0.0
                    taking = [one.tenancy for one in others if one.tenancy.used() is not None]
                    waits_for_itself = all(one.threads() == {transition.thread} for one in taking)
                    if not never_fits and taking and waits_for_itself:
                        held = "this thread itself holds what takes the room, so it cannot wait"
                        raise NoRoomError(f"{transition.no_room}; {held}")
                    # Of two loads that need more than they were admitted for, one gives up.
                    loads = [load for one in others if (load := one.tenancy.transition) is not None]
                    is_stuck = is_loaded and any(load.admitted and load.no_room for load in loads)
                    if never_fits or left <= 0 or is_stuck or not taking:
                        raise NoRoomError(transition.no_room)
                    # Nobody tells when another process frees memory of a card.
                    self.changed.wait(min(left, 1.0 if self._is_auto else LONGEST_WAIT_S))
                    continue
                oldest = min(idle, key=lambda one: one.tenancy.idle_since)
            self._evict(oldest)

    def _evict(self, host: ModelHost[Any]) -> None:
        """Let an idle model sleep if there is room for that, or unload it, or a sleeper."""
        if host.tenancy.is_asleep():
            host.unload_if(host.tenancy.is_asleep, "evicted")
        else:
            host.unload_if(host.tenancy.is_idle, "evicted", sleeps=self._has_bed(host))

    def evict_idle(self, host: ModelHost[Any]) -> bool:
        """Evict all other idle models, because memory ran out; return whether there were any."""
        others = [one for one in list(self._hosts.values()) if one is not host]
        idle = [other for other in others if other.tenancy.is_idle()]
        for other in idle:
            self._evict(other)
        return bool(idle)

    def _has_bed(self, host: ModelHost[Any]) -> bool:
        """Return whether a model may sleep; unload sleepers to make that possible."""
        if not self._sleep_bytes:
            return False
        needed = awake_bytes(host.tenancy.used() or {})
        while True:
            asleep = [other for other in self._hosts.values() if other.tenancy.is_asleep()]
            blocks = [block for other in asleep for block in (other.tenancy.used() or {}).values()]
            taken = sum(nbytes for device, nbytes in blocks if device == ASLEEP)
            limit = self._sleep_bytes
            if limit == "auto":
                limit = (_available_bytes() + taken) // 2
            if needed + taken <= limit:
                return True
            if needed > limit or not asleep:
                return False
            self._evict(min(asleep, key=lambda one: one.tenancy.idle_since))

    def _lacking(
        self, needed: Blocks, others: list[ModelHost[Any]] | None, is_made: bool = False
    ) -> str:
        """Return the limit that a model exceeds beside others; empty if it fits.

        Args:
            needed: The memory of the model.
            others: The other hosts; None to ask whether it would fit if there were nothing else.
            is_made: Whether the model has that memory already.
        """
        used = [taken for other in others or () if (taken := other.tenancy.used()) is not None]
        awake = [one for one in used if not any(device == ASLEEP for device, _ in one.values())]
        if self._max_loaded is not None and len(awake) >= self._max_loaded:
            return f"at most {self._max_loaded} may be loaded"
        together = dict(needed)
        for one in (*used, *(other.tenancy.remains() for other in others or ())):
            together.update(one)
        for device, budget in self._budgets.items():
            if (by_device(together).get(device, 0) if device else awake_bytes(together)) > budget:
                return f"the budget is {format_bytes(budget)}" + (f" on {device}" if device else "")
        for device, memory in memory_snapshot().devices.items() if self._is_auto else ():
            size, headroom = by_device(needed).get(device, 0), self._headroom_bytes
            room = memory.total_bytes - (memory.total_bytes // 10 if headroom is None else headroom)
            if others is not None:
                unused = memory.reserved_bytes - memory.allocated_bytes
                room += memory.free_bytes + unused - memory.total_bytes + is_made * size
                room -= sum(by_device(_pending(other)).get(device, 0) for other in others)
            if 0 < size > room:
                return f"{device} has room for {format_bytes(max(0, room))}"
        return ""


def _pending(host: ModelHost[Any]) -> Blocks:
    """Return the memory that a load under way was admitted for and does not have yet."""
    transition = host.tenancy.transition
    return {} if transition is None or transition.is_made else transition.admitted or {}


def _available_bytes() -> int:
    """Return the host's available memory in bytes; 0 if it is unknown."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return int(text.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return 0


def _explain(
    host: ModelHost[Any], blocks: Blocks, lacking: str, others: list[ModelHost[Any]]
) -> str:
    held = []
    for other in others:
        used, why = other.tenancy.used(), str(other.tenancy.in_use())
        if used is None:
            used, why = other.tenancy.remains() or None, "unloaded, but callers keep parts of it"
        if used is not None:
            size, why = format_bytes(awake_bytes(used)), why.removeprefix(f"{other.name} ")
            held.append(f"{other.name} has {size} ({why})")
    needs = f", and it needs {format_bytes(awake_bytes(blocks))}" if blocks else ""
    return f"no room for {host.name}: {lacking}{needs}; {'; '.join(held) or 'nothing is loaded'}"
