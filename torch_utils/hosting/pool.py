"""ModelPool: hosts that share a budget of memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch_utils._memory import memory_snapshot
from torch_utils._report import CleanupReport, format_bytes
from torch_utils._resource import closes_on_error
from torch_utils._runtime import log
from torch_utils.errors import ModelInUseError, NoRoomError, UnknownModelError
from torch_utils.hosting.arguments import Devices, check_positive, parse_keep_alive, parse_sizes
from torch_utils.hosting.footprint import ASLEEP, Footprint, awake_bytes, by_device
from torch_utils.hosting.host import ModelHost
from torch_utils.hosting.lease import CLOSE_S, AsyncLease, Lease, ModelLender
from torch_utils.hosting.loaded_model import WARNING, LoadedModel
from torch_utils.hosting.process import ModelProcess
from torch_utils.hosting.state_machine import CHANGED, MEASURE_S, HostStatus, Load

__all__ = ["ModelPool"]

M = TypeVar("M")
T = TypeVar("T")

_ASK_S = 0.5
"""How often a load that waits looks for room that nobody reports, in seconds."""
_BACK, _BACK_S, _POLL_S = 0.9, 5.0, 0.02
"""The part of a process's memory that must be back on its devices, and how long to wait for it."""


class ModelPool(ModelLender):
    """Lend several models, and keep only as many loaded as fit into the budget.

    ::

        pool = ModelPool(budget_bytes=4 << 30)
        pool.add("small", load_small)
        pool.add("large", load_large, isolation="process")
        with pool.lease("small", timeout_s=30) as model:
            model.encode(texts)

    Before a load, the pool evicts idle models, the least recently used first, until the new one
    fits. A model is never evicted while it is leased, nor if it is pinned by its own
    ``keep_alive=-1``. A pinned model that found no room in time is loaded when there is room.

    The size of a model is the one that `add` declares. Otherwise it is the size of its tensors and
    arrays, measured again for each load, or, for a model in its own process, the memory of that
    process. It is then known only after the first load, which may exceed the budget; the pool
    evicts others or unloads it again. What two models share counts once, and what callers keep of
    an unloaded model still counts. Memory outside of tensors and arrays does not count unless the
    size is declared.

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
        keep_alive: The keep-alive time of models that `add` gives none; see `ModelHost`. It pins
            none of them.

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
        self._hosts: dict[str, ModelHost[Any]] = {}
        self._is_auto = budget_bytes == "auto"
        sizes: Any = None if self._is_auto else budget_bytes
        self._budgets = {} if sizes is None else parse_sizes("budget_bytes", sizes, "")
        self._has_budget = budget_bytes is not None
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
            **options: The options of `ModelHost`: ``keep_alive`` (by default the pool's; -1 here
                pins the model), ``isolation``, ``nbytes``, ``max_leases``, ``call_timeout_s``,
                ``environment``.

        Returns:
            The model's host. Leases of the host count as leases of the pool.

        Raises:
            TypeError: An argument has the wrong type; see `ModelHost`.
            ValueError: The pool has a model of this name, or an argument is invalid.
            ResourceClosedError: The pool is closed.
        """
        self.ensure_open()
        host: ModelHost[M]
        host = ModelHost(load, name=name, **{"keep_alive": self._keep_alive, **options})
        is_pinned = "keep_alive" in options and host._machine.keep_alive_s == math.inf
        host._join(self, is_pinned)
        if self._hosts.setdefault(name, host) is not host:
            host.close()
            raise ValueError(f"this pool has a model {name!r} already; choose another name")
        if self.closed:  # By another thread, in between.
            host.close()
            self.ensure_open()
        return host

    def remove(self, name: str, timeout_s: float | None = None) -> CleanupReport:
        """Unload a model and close its host, and forget both.

        Args:
            name: Its name in the pool.
            timeout_s: Seconds to wait for the end of leases; see `ModelHost.unload`.

        Returns:
            The report of the release.

        Raises:
            UnknownModelError: The pool has no model of this name.
            ModelInUseError: The model is leased. The pool keeps it.
        """
        host = self._host(name)
        report = CleanupReport() if host.closed else host.unload(timeout_s)
        host.close()
        if host.state != "closed":
            raise host._machine.in_use()
        self._hosts.pop(name, None)
        return report

    def __contains__(self, name: object) -> bool:
        return name in self._hosts

    def lease(self, name: str, timeout_s: float | None = None) -> Lease[Any]:
        """Return a context manager that lends a model; see `ModelHost.lease`.

        Args:
            name: Its name in the pool.
            timeout_s: Seconds to wait for room, which other processes may give as well, and for
                other threads that load or unload the model. None for no limit.

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

    def unload(self, name: str, timeout_s: float | None = None) -> CleanupReport:
        """Unload one model; see `ModelHost.unload`.

        Args:
            name: Its name in the pool.
            timeout_s: Seconds to wait for the end of leases.

        Returns:
            The report of the release.

        Raises:
            UnknownModelError: The pool has no model of this name.
        """
        return self._host(name).unload(timeout_s)

    def replace(self, name: str, load: Callable[[], Any], **options: Any) -> bool:
        """Load a new version of one model, and lend that one; see `ModelHost.replace`.

        Args:
            name: Its name in the pool.
            load: Returns the new model.
            **options: ``overlap`` and ``timeout_s``. Both versions count for the limits of the
                pool while both are in memory.

        Returns:
            True if this call loaded the new model.

        Raises:
            UnknownModelError: The pool has no model of this name.
        """
        return self._host(name).replace(load, **options)

    async def areplace(self, name: str, load: Callable[[], Any], **options: Any) -> bool:
        """Replace one model in a thread; see `replace`."""
        return await self._host(name).areplace(load, **options)

    def status(self) -> dict[str, HostStatus]:
        """Return the state of each model by name, in the order of `add`."""
        return {name: host.status() for name, host in list(self._hosts.items())}

    def _release(self) -> None:
        # There are none if its __init__ has failed.
        hosts = list(self.__dict__.get("_hosts", {}).values())[::-1]
        for host in hosts:  # First all of them, so that none lends while another waits.
            host._machine.stop_lending()
        ends = time.monotonic() + CLOSE_S if self._closes_by is None else self._closes_by
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

    # Room for a load

    def _admit(
        self, host: ModelHost[Any], load: Load, footprint: Footprint, deadline: float
    ) -> None:
        """Evict idle models until a load fits, and wait for leases to end if necessary.

        Args:
            host: The host that loads.
            load: Its load, which records the admitted memory.
            footprint: Its memory; before the load, that of the last load, or what is declared.
            deadline: When to give up, by `time.monotonic`. A load in the background gives up when
                nobody waits for it, unless its model is pinned.

        Raises:
            NoRoomError: There is no room in time, or the model can never fit. The message names
                what holds the memory.
            ResourceClosedError: The host was closed meanwhile.
        """
        is_loaded, machine, measured_at = load.admitted is not None, host._machine, -math.inf
        while True:
            if time.monotonic() - measured_at >= MEASURE_S:  # Every lease that ends wakes this.
                measured_at = time.monotonic()
                for other in [one for one in self._hosts.values() if one is not host]:
                    other._machine.measure()
            warning = ""
            with CHANGED:
                machine.ensure_wanted(load)
                verb, victim, why = self._decide(host, load, footprint, is_loaded, deadline)
                if verb == "fits":
                    load.admitted, load.is_made, load.no_room = footprint, is_loaded, ""
                    return
                if verb != "evict":
                    is_asked_for = load.make is not None or not load.in_background
                    is_optional = not is_asked_for and not host._is_pinned
                    left = deadline - time.monotonic()
                    if verb == "refuse" or left <= 0 or (is_optional and not machine.waiting):
                        raise NoRoomError(why)
                    if not load.no_room and deadline == math.inf and is_asked_for:
                        warning = why
                    load.no_room = why
                    # Nobody tells when another process or a caller frees memory.
                    if not warning:
                        CHANGED.wait(min(left, _ASK_S))
            if warning:
                log(WARNING, "waiting without a limit: %s", warning)
            if victim is not None:
                self._evict(victim)

    def _decide(
        self,
        host: ModelHost[Any],
        load: Load,
        footprint: Footprint,
        is_loaded: bool,
        deadline: float,
    ) -> tuple[Literal["fits", "evict", "wait", "refuse"], ModelHost[Any] | None, str]:
        """Decide about a load, under the lock; changes nothing.

        Returns:
            What to do, the model to evict, and why the load has to wait or is refused.
        """
        hosts = list(self._hosts.values())
        others = [other for other in hosts if other is not host]
        lacking = self._lacking(load, footprint, hosts, is_loaded)
        if not lacking:
            return "fits", None, ""
        never_fits = bool(self._lacking(load, footprint, []))
        evictable = [one for one in others if not one._is_pinned]
        idle = [one for one in evictable if one._machine.is_idle()]
        if not idle:  # Sleepers have a part of the host's memory only.
            idle = [one for one in evictable if one._machine.is_asleep()]
            if self._lacking(load, footprint, [one for one in hosts if one not in idle], is_loaded):
                idle = []
        if idle and not never_fits:
            return "evict", min(idle, key=lambda one: one._machine.idle_since), ""
        why = _explain(host, load, footprint, lacking, [] if never_fits else hosts)
        taking = [one._machine for one in others if one._machine.used() and not _stays(one)]
        # Other processes may give room as well, if there is time for that.
        can_wait = self._is_auto and deadline < math.inf
        is_own = taking and all(one.threads() == {load.asked_by} for one in taking)
        if is_own and not never_fits and not can_wait:
            held = "this thread itself holds what takes the room, so it cannot wait"
            return "refuse", None, f"{why}; {held}"
        # Of two loads that need more than they were admitted for, one gives up.
        loads = [one._machine.transition for one in others]
        is_stuck = is_loaded and any(
            isinstance(one, Load) and one.admitted and one.no_room for one in loads
        )
        may_end = bool(taking or self._is_auto or host._machine.replaced)
        may_end |= any(one._machine.remains() or one._machine.given_up for one in hosts)
        may_end |= host._is_pinned and load.in_background  # Until somebody unloads another one.
        return "refuse" if never_fits or is_stuck or not may_end else "wait", None, why

    def _evict(self, host: ModelHost[Any]) -> None:
        """Let an idle model sleep if there is room for that, or unload it, or a sleeper."""
        machine = host._machine
        if machine.is_asleep():
            host._unload_if(machine.is_asleep, "evicted")
        else:
            host._unload_if(machine.is_idle, "evicted", sleeps=self._has_bed(host))

    def _evict_idle(self, host: ModelHost[Any]) -> bool:
        """Evict all other idle models, because memory ran out; return whether there were any."""
        others = [one for one in self._hosts.values() if one is not host and not one._is_pinned]
        idle = [other for other in others if other._machine.is_idle()]
        for other in idle:
            self._evict(other)
        return bool(idle)

    def _close(self, loaded: LoadedModel, footprint: Footprint) -> None:
        """Close a loaded model. Its process's memory is lent only when its devices have it back."""
        is_running = isinstance(loaded, ModelProcess) and loaded.is_alive()
        sizes = by_device(loaded.footprint()) if is_running else {}
        if is_running and not sizes.keys() - {"host"}:  # It does not know, but `add` has said it.
            sizes = by_device(footprint)
        before = memory_snapshot().devices if sizes.keys() - {"host"} else {}
        loaded.close()
        until = time.monotonic() + _BACK_S
        wanted = {
            name: before[name].free_bytes + _BACK * sizes[name]
            for name in sizes.keys() & before.keys() - {"host"}
        }
        while wanted and time.monotonic() < until:
            now = memory_snapshot().devices
            if all(
                name not in now or now[name].free_bytes >= free for name, free in wanted.items()
            ):
                return
            time.sleep(_POLL_S)

    def _has_bed(self, host: ModelHost[Any]) -> bool:
        """Return whether a model may sleep; unload sleepers to make that possible."""
        if not self._sleep_bytes:
            return False
        needed = awake_bytes(_together(host._machine.used()))
        while True:
            asleep = [
                one
                for one in self._hosts.values()
                if one._machine.is_asleep() and not one._is_pinned
            ]
            footprint = [
                block for one in asleep for block in _together(one._machine.used()).values()
            ]
            taken = sum(nbytes for device, nbytes in footprint if device == ASLEEP)
            limit = self._sleep_bytes
            if limit == "auto":
                limit = (_available_bytes() + taken) // 2
            if needed + taken <= limit:
                return True
            if needed > limit or not asleep:
                return False
            self._evict(min(asleep, key=lambda one: one._machine.idle_since))

    def _lacking(
        self, load: Load, needed: Footprint, hosts: list[ModelHost[Any]], is_made: bool = False
    ) -> str:
        """Return the limit that a load exceeds beside what hosts have; empty if it fits.

        Args:
            load: The load.
            needed: The memory of its model.
            hosts: The hosts, with the one that loads. Empty to ask whether it would fit if there
                were nothing else.
            is_made: Whether the model has that memory already.
        """
        used = [one for host in hosts for one in host._machine.used(apart_from=load)]
        awake = [one for one in used if not any(device == ASLEEP for device, _ in one.values())]
        if self._max_loaded is not None and len(awake) >= self._max_loaded:
            return f"at most {self._max_loaded} may be loaded"
        together = _together([needed, *used, *(host._machine.remains() for host in hosts)])
        for device, budget in self._budgets.items():
            if (by_device(together).get(device, 0) if device else awake_bytes(together)) > budget:
                return f"the budget is {format_bytes(budget)}" + (f" on {device}" if device else "")
        for device, memory in memory_snapshot().devices.items() if self._is_auto else ():
            size, headroom = by_device(needed).get(device, 0), self._headroom_bytes
            room = memory.total_bytes - (memory.total_bytes // 10 if headroom is None else headroom)
            if hosts:
                unused = memory.reserved_bytes - memory.allocated_bytes
                room += memory.free_bytes + unused - memory.total_bytes + is_made * size
                room -= sum(by_device(_pending(one, load)).get(device, 0) for one in hosts)
            if 0 < size > room:
                return f"{device} has room for {format_bytes(max(0, room))}"
        return ""


def _stays(host: ModelHost[Any]) -> bool:
    """Return whether it is pinned, and nothing is about to end."""
    return host._is_pinned and (host._machine.is_idle() or host._machine.is_asleep())


def _together(several: list[Footprint]) -> Footprint:
    return {key: block for footprint in several for key, block in footprint.items()}


def _pending(host: ModelHost[Any], apart_from: Load) -> Footprint:
    """Return the memory that loads under way were admitted for and do not have yet."""
    loads = host._machine.transition, host._machine.replacement
    return _together(
        [
            one.admitted
            for one in (*loads, *host._machine.given_up)
            if isinstance(one, Load) and one is not apart_from and one.admitted and not one.is_made
        ]
    )


def _available_bytes() -> int:
    """Return the host's available memory in bytes; 0 if it is unknown."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return int(text.partition("MemAvailable:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return 0


def _explain(
    host: ModelHost[Any],
    load: Load,
    footprint: Footprint,
    lacking: str,
    hosts: list[ModelHost[Any]],
) -> str:
    held = []
    for one in hosts:
        used, why = one._machine.used(apart_from=load), str(one._machine.in_use())
        why = why.removeprefix(f"{one.name} ")
        if one is host and load.make is not None:
            why = "the version in use; pass overlap=False to unload it first"
        elif _stays(one):
            why = "pinned by keep_alive=-1"
        if not used and (remains := one._machine.remains()):
            used, why = [remains], "unloaded, but callers keep parts of it"
        if used:
            held.append(f"{one.name} has {format_bytes(awake_bytes(_together(used)))} ({why})")
    needs = f", and it needs {format_bytes(awake_bytes(footprint))}" if footprint else ""
    return f"no room for {host.name}: {lacking}{needs}; {'; '.join(held) or 'nothing is loaded'}"
