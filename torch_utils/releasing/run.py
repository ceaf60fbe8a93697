"""release: free the memory of objects in place, and report what was freed.

Neither a ``with`` block nor a function can unbind the caller's variable. So the memory is taken out
of the object itself, and any later use of the object raises an error that says so.
"""

from __future__ import annotations

import gc
import logging  # noqa: F401  (so that errors at exit can be logged)
import os
import sys
import threading
import time
from _thread import RLock
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from types import FrameType
from typing import Any, Literal

from torch_utils._deferral import DeferredSignals
from torch_utils._events import notify
from torch_utils._runtime import ERROR, early_bound, is_shutting_down, log, whole_torch
from torch_utils.errors import TorchUtilsError
from torch_utils.memory import MemorySnapshot, empty_caches, memory_snapshot
from torch_utils.memory import trim_host as trim_host_heap
from torch_utils.oom import Handled
from torch_utils.releasing.caches import clear_caches_of_torch
from torch_utils.releasing.holders import SEARCH_S, Holders, find_holders
from torch_utils.releasing.internals import without_overrides
from torch_utils.releasing.objects import no_collections
from torch_utils.releasing.plan import plan
from torch_utils.releasing.storages import Held, Inventory, Target
from torch_utils.releasing.tensors import TensorTarget, free_unused_tensors, is_any_kept
from torch_utils.report import CleanupReport, StillHeld

Collect = Literal["auto", "never", "full"]
IN_A_THREAD = "another thread, perhaps, that may be computing with it"
LENDER = "the array or buffer that it was made from"
_PACKAGE = __name__.partition(".")[0]


def check_collect(collect: str) -> None:
    """Check the value of ``collect``."""
    if collect not in ("auto", "never", "full"):
        raise ValueError(f'collect must be "auto", "never" or "full", got {collect!r}')


class Release:
    """One release and its state."""

    def __init__(
        self, *, collect: Collect, trim_host: bool, thorough: bool, search_s: float = SEARCH_S
    ) -> None:
        check_collect(collect)
        if type(search_s) not in (int, float) or not 0 <= search_s < float("inf"):
            raise ValueError(f"search_s must be a number of seconds, at least 0, got {search_s!r}")
        self.handled: Handled = Handled(sys.exc_info()[1])  # Older exceptions do not count.
        self._search_s = search_s
        self._collect = collect
        self._trim_host = trim_host
        self._thorough = thorough
        self._holders: Holders | None = None
        self._place = _place_of_caller()
        self.errors: list[BaseException] = []
        self._started = 0.0
        self._before = MemorySnapshot()

    def run(self, objects: Sequence[Any], *, is_again: bool = False) -> None:
        """Release objects: plan and count all of them first.

        Args:
            objects: The objects to release.
            is_again: See `plan`.

        Raises:
            TypeError: An object is not supported. Nothing was changed.
        """
        lock = _LOCK  # A fork in a ``close()`` gives the child a new lock.
        has_lock = lock.acquire(timeout=0 if is_shutting_down() else LOCK_WAIT_S)
        try:
            with self.under_way():
                with no_collections():
                    targets = plan(objects, is_again=is_again)
                    self._count(targets)
                self._give_up(targets)
        finally:
            if has_lock:
                lock.release()

    def _count(self, targets: list[Target]) -> None:
        if not is_shutting_down():
            with without_overrides(whole_torch()):
                for target in targets:
                    try:
                        target.count(self._inventory)
                    except BaseException as error:  # As in `_give_up`.
                        self.failed(target.name, error)
                try:
                    self._inventory.add_other_modules()
                except Exception as error:  # Attributes may hold anything.
                    self.failed("other modules", error)

    def _give_up(self, targets: list[Target]) -> None:
        for is_tensor, group in groupby(targets, lambda t: isinstance(t, TensorTarget)):
            with without_overrides(whole_torch()) if is_tensor else nullcontext():
                for target in group:
                    try:
                        if target.closes or not is_shutting_down():
                            target.give_up(self._place)
                    except BaseException as error:
                        # Each object is released, whatever the others raise. `raise_interrupt`
                        # raises what is not an Exception later.
                        self.failed(target.name, error)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count nested releases of this thread, such as in a ``close()``, as part of this one."""
        if not self._started:  # Not in `__init__`: a scope may start before torch is imported.
            started = time.perf_counter()
            self._before = memory_snapshot()
            self._inventory = Inventory()
            self._started = started  # Last: near the recursion limit the others may fail.
        outer = _UNDER_WAY.release
        _UNDER_WAY.release = self
        try:
            yield
        finally:
            _UNDER_WAY.release = outer

    def failed(self, name: str, error: BaseException) -> None:
        """Record the exception of one step, and log it once."""
        self.errors.append(error)
        # Exceptions of this package need no traceback.
        trace = None if isinstance(error, TorchUtilsError) else error
        log(ERROR, "releasing %s failed: %r", name, error, exc_info=trace)
        if not is_shutting_down():  # The report must not keep its frames alive.
            self.handled.clear_frames(error)

    def raise_interrupt(self) -> None:
        """Raise the first exception that is not an Exception, such as KeyboardInterrupt."""
        for error in self.errors:
            if not isinstance(error, Exception):
                raise error

    def finish(self) -> CleanupReport:
        """Collect garbage, trim the heap and empty the caches as requested, and report.

        A nested release leaves this to the outer one, which then counts for both.
        """
        outer = _UNDER_WAY.release
        try:
            if is_shutting_down():
                return CleanupReport(
                    errors=tuple(self.errors),
                    duration_s=time.perf_counter() - self._started,
                    skipped="the program is ending, and the system takes the memory back",
                )
            if outer is None:
                self._give_back()
            report = self._report()
            if outer is None:
                notify("release", report=report)
            else:
                outer._inventory.absorb(self._inventory)
            return report
        finally:
            self._inventory.free()

    def _report(self) -> CleanupReport:
        freed_bytes, alive, lent = self._inventory.tally()
        unknown = (IN_A_THREAD,) if alive and is_any_kept() else ()
        holders = self._holders
        held = [(h, (holders.of(h) if holders is not None else ()) or unknown) for h in alive]
        held += [(h, (LENDER,)) for h in lent]
        return CleanupReport(
            freed_bytes=freed_bytes,
            still_held=tuple(StillHeld(h.what, h.nbytes, h.device, who) for h, who in held),
            errors=tuple(self.errors),
            duration_s=time.perf_counter() - self._started,
            before=self._before,
            after=memory_snapshot(),
        )

    def _give_back(self) -> None:
        free_unused_tensors()
        if self._thorough:
            clear_caches_of_torch()
        self._collect_garbage()
        if self._inventory or self._collect == "full" or self._thorough:
            empty_caches()
            if self._trim_host:
                trim_host_heap()

    def _collect_garbage(self) -> None:
        """Collect older generations only if needed, because each costs more than the one before."""
        if self._collect == "full":
            gc.collect()
        elif self._collect == "auto":
            for generation in range(2):
                if not self._survivors():
                    return
                gc.collect(generation)
        survivors = self._survivors()
        if not survivors:
            return
        self._holders = find_holders(whole_torch(), survivors, self._search_s)
        # Survivors that a variable leads to are not garbage.
        if self._collect == "auto" and not self._holders.explain(survivors):
            gc.collect()
            self._inventory.forget_gone()

    def _survivors(self) -> list[Held]:
        self._inventory.forget_gone()
        return self._inventory.alive()


LOCK_WAIT_S = 5.0
_LOCK = RLock()


class _UnderWay(threading.local):
    """The innermost release of each thread."""

    release: Release | None = None


_UNDER_WAY = _UnderWay()


def _renew_lock() -> None:
    global _LOCK
    _LOCK = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _place_of_caller() -> str:
    """Return the line that called for the release: the nearest frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] not in (_PACKAGE, "contextlib"):
            return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}()"
        frame = frame.f_back
    return "by torch_utils"


@early_bound
def release(
    *objects: Any,
    collect: Collect = "auto",
    trim_host: bool = True,
    thorough: bool = False,
    search_s: float = SEARCH_S,
) -> CleanupReport:
    """Free the memory of objects in place, even if variables still refer to them.

    Supports modules (also SentenceTransformer, CrossEncoder, transformers models and compiled
    modules), tensors, optimizers, faiss indexes, containers of these and objects with ``close()``.
    Objects that hold any of these in attributes, such as a pipeline, are supported as well;
    docs/memory.md has a table. No code of the objects runs except ``close()``.

    Afterwards a module, optimizer or index raises `ReleasedError` on use, and a tensor is empty.
    Weights and submodules that a live model shares stay intact.

    Exceptions of a ``close()`` are logged and listed in the report. Only KeyboardInterrupt and
    similar ones are raised, after all objects were released. During shutdown only ``close()``
    methods are called, because the end of the process returns the memory sooner.

    One lock serialises releases, so concurrent threads release an object once. After `LOCK_WAIT_S`
    seconds a thread continues without the lock: a ``close()`` may be waiting for that thread.

    Args:
        *objects: The objects to release, in this order. None is ignored.
        collect: When to collect garbage. "auto": only if released memory is still alive, younger
            generations first, and all generations only if no variable leads to that memory.
            "never" or "full": never or always.
        trim_host: Whether to return unused pages of the C heap to the system (glibc).
        thorough: Whether to clear also what torch keeps outside its allocators: compiled code,
            cuBLAS workspaces, cuFFT plans, IPC handles and pinned host memory. Also collects cycles
            that `gc.freeze` has excluded. The time is not limited.
        search_s: Seconds to search for what still holds memory. A higher value finds more distant
            holders.

    Returns:
        What was freed and what is still held, as measured.

    Raises:
        TypeError: An object is not supported; the message says what to pass instead. Nothing was
            changed.
        ValueError: ``collect`` is invalid, or ``search_s`` is not a number of seconds.
    """
    try:
        with DeferredSignals():
            work = Release(
                collect=collect, trim_host=trim_host, thorough=thorough, search_s=search_s
            )
            work.run(objects)
            report = work.finish()
    except Exception as error:
        # A destructor may call this after this package's modules were torn down.
        if not is_shutting_down():
            raise
        return CleanupReport(errors=(error,), skipped="the interpreter is shutting down")
    work.raise_interrupt()
    return report


def storage_bytes(thing: Any) -> dict[str, int]:
    """Return the bytes of an object's storages, by "host" and device, without changing it.

    Empty for an object that `release` does not support. Walks the heap at most twice.
    """
    inventory = Inventory()
    sizes: dict[str, int] = {}
    try:
        with without_overrides(whole_torch()):
            for target in plan([thing]):
                target.count(inventory)
        for held in inventory.alive():
            sizes[held.device] = sizes.get(held.device, 0) + held.nbytes
    except TypeError:
        return {}
    finally:
        inventory.free()
    return sizes
