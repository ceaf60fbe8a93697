"""release: free the memory of objects in place, and report what was freed.

Neither a ``with`` block nor a function can unbind the caller's variable. So the memory is taken out
of the object itself, and any later use of the object raises an error that says so. One rule holds:
what is passed is emptied, and everything in it loses that one reference.
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
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from torch_utils._memory import (
    MemorySnapshot,
    clear_caches_of_torch,
    empty_caches,
    memory_snapshot,
    query,
)
from torch_utils._memory import trim_host as trim_host_heap
from torch_utils._oom import clear_exception_frames
from torch_utils._registry import QUIET_THREADS, ensure_ran
from torch_utils._release.counting import (
    OTHERS,
    TENSOR,
    Inventory,
    Root,
    roots_of,
    unsupported,
    without_overrides,
)
from torch_utils._release.holders import Holders, clear_ended_frames, find_holders
from torch_utils._release.objects import dictionary_slot, find_in_class, is_released, name_of
from torch_utils._release.tombstones import bury, empty_tensor
from torch_utils._report import CleanupReport, StillHeld, is_in_use, variables_first
from torch_utils._runtime import (
    DEBUG,
    ERROR,
    LISTENERS,
    early_bound,
    is_shutting_down,
    log,
    notify,
    whole_torch,
)
from torch_utils._signals import DeferredSignals
from torch_utils.errors import TorchUtilsError

Collect = Literal["auto", "young", "never", "full"]
LEAST_BYTES = 1 << 20
"""Less memory than this is worth neither a full garbage collection nor a trim of the heap."""
_PACKAGE = __name__.partition(".")[0]


def check_collect(collect: str) -> None:
    """Check the value of ``collect``."""
    if collect not in ("auto", "young", "never", "full"):
        raise ValueError(f'collect must be "auto", "young", "never" or "full", got {collect!r}')


@dataclass
class Release:
    """One release and its state.

    Attributes:
        inventory: The memory that it gives up; what is still held can be asked of it later.
        errors: The exceptions of its steps.
        empties_all: Whether caches are emptied and the heap is trimmed in any case.
        collects_all: Whether frames were cleared that held memory in cycles.
    """

    collect: Collect
    trim_host: bool
    thorough: bool
    empty_cache: bool = True

    def __post_init__(self) -> None:
        check_collect(self.collect)
        self.errors: list[BaseException] = []
        self.empties_all = self.collects_all = self._has_called = False
        self._place = _place_of_caller()
        self._holders: Holders = {}
        self._started = 0.0
        self._before = MemorySnapshot()
        self.inventory = Inventory()

    def run(self, objects: Sequence[Any], *, is_again: bool = False) -> None:
        """Release objects: examine all of them, close them, and then empty them.

        The lock is held while objects are examined and emptied, not while code of the program
        runs, which may wait for a thread that releases something else. An object that another
        release is closing at the time is left to that one.

        Args:
            objects: The objects to release.
            is_again: Whether they were accepted before; some may be empty by now.

        Raises:
            TypeError: An object cannot be released. Nothing was changed.
        """
        if is_shutting_down():
            self._close_at_exit(objects)
            return
        trash: list[Any] = []
        roots: list[Root] = []
        with self.under_way():
            try:
                with _LOCK, without_overrides(whole_torch()):
                    roots = self._examine(objects, is_again)
                    _CLOSING.update((id(root.thing), root.thing) for root in roots)
                for root in roots:
                    self._close(root)
                with _LOCK, without_overrides(whole_torch()):
                    self._empty(roots, trash)
            finally:
                for root in roots:
                    _CLOSING.pop(id(root.thing), None)
            QUIET_THREADS.append(threading.get_ident())
            try:
                trash.clear()
            finally:
                QUIET_THREADS.remove(threading.get_ident())

    def _close_at_exit(self, objects: Sequence[Any]) -> None:
        """Call ``close()`` only. The lock is not needed, and a thread that has it may hang."""
        for root in roots_of(objects, self.inventory):
            if root.close is not None and id(root.thing) not in _CLOSING:
                _CLOSING[id(root.thing)] = root.thing
                self._call(f"{name_of(type(root.thing))}.close()", root.close)

    def _examine(self, objects: Sequence[Any], is_again: bool) -> list[Root]:
        """Count the memory of objects, and return those to close or to empty."""
        roots = [r for r in roots_of(objects, self.inventory) if id(r.thing) not in _CLOSING]
        try:
            self.inventory.count(roots)
        except Exception as error:  # Any object of the program is read.
            self.failed("the objects", error)
            return roots
        for root in roots:
            if root.is_passed and not (is_again or root.is_found or root.close):
                raise unsupported(root.thing, OTHERS)
        return [root for root in roots if root.is_found or root.close]

    def _close(self, root: Root) -> None:
        """Run what an object itself does at its end, while it is whole."""
        name = name_of(type(root.thing))
        if root.close is not None:
            self._call(f"{name}.close()", root.close)
            root.is_found = self._holds_memory(root)
        destructor = find_in_class(type(root.thing), "__del__")
        if destructor is not None and root.is_found:
            if dictionary_slot(type(root.thing)) is None:
                root.is_found = False  # Python will call it, on the whole object.
            elif not is_released(root.thing):
                self._call(f"{name}.__del__()", lambda: destructor(root.thing))

    def _holds_memory(self, root: Root) -> bool:
        """Return whether a closed object still holds memory; otherwise it stays what it is."""
        closed = Root(root.thing, root.name)
        try:
            with without_overrides(whole_torch()):
                Inventory(follows_functions=False).count([closed])
        except Exception as error:  # As in `_examine`.
            self.failed(root.name, error)
        return closed.is_found

    def _call(self, name: str, function: Any) -> None:
        self._has_called = True
        try:
            ensure_ran(function())
        except BaseException as error:
            # Each object is released, whatever the others raise. `raise_interrupt` raises what is
            # not an Exception later.
            self.failed(name, error)

    def _empty(self, roots: list[Root], trash: list[Any]) -> None:
        for root in roots:
            try:
                if not root.is_found or is_released(root.thing):
                    continue
                if self.inventory.kind(root.thing) == TENSOR:
                    empty_tensor(root.thing, root.name, trash)
                else:
                    bury(root.thing, f"this {root.name}", self._place, trash)
            except BaseException as error:  # As in `_call`.
                self.failed(root.name, error)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count nested releases of this thread, such as in a ``close()``, as part of this one."""
        outer = _outer_release()
        _UNDER_WAY.release = self
        if not self._started:  # Not in `__init__`: a scope may start before torch is imported.
            self._started = time.perf_counter()
            self._before = memory_snapshot()
            self.inventory = Inventory() if outer is None else outer.inventory
        try:
            yield
        finally:
            _UNDER_WAY.release = outer

    def failed(self, name: str, error: BaseException) -> None:
        """Record the exception of one step, and log it once."""
        self.errors.append(error)
        # Exceptions of this package need no traceback.
        trace = None if isinstance(error, TorchUtilsError) else error
        level = DEBUG if type(error).__name__ == "CancelledError" else ERROR
        log(level, "releasing %s failed: %r", name, error, exc_info=trace)
        if not is_shutting_down():  # The report must not keep its frames alive.
            clear_exception_frames(error)

    def raise_interrupt(self) -> None:
        """Raise the first exception that is not an Exception, such as KeyboardInterrupt."""
        for error in self.errors:
            if not isinstance(error, Exception):
                raise error

    def finish(self) -> CleanupReport:
        """Collect garbage, trim the heap and empty the caches as requested, and report.

        A nested release leaves this to the outer one, and both count the same memory.
        """
        outer = _outer_release()
        if is_shutting_down():
            return CleanupReport(
                errors=tuple(self.errors),
                duration_s=time.perf_counter() - self._started,
                skipped="the program is ending, and the system takes the memory back",
            )
        if outer is None:
            self._give_back()
        report = self._report()
        if outer is None and LISTENERS:
            notify("release", report=report)
        return report

    def _give_back(self) -> None:
        if self.thorough:
            clear_caches_of_torch()
        torch: Any = whole_torch()
        if torch is not None:  # In this thread it keeps copies of weights.
            query(torch.clear_autocast_cache, None, "autocast's cache")
        self._collect_garbage()
        # Weights that were mapped from a file count too: the heap has what the model computed.
        freed_bytes = self.inventory.freed_bytes()
        is_all = self.empties_all or self.thorough or self.collect == "full"
        if self.empty_cache and (is_all or freed_bytes.keys() - {"host"}):
            empty_caches()
        is_large = freed_bytes.get("host", 0) >= LEAST_BYTES
        if self.trim_host and (is_all or is_large or self.inventory.is_partial or self._has_called):
            trim_host_heap()

    def _collect_garbage(self) -> None:
        """Collect garbage as little as possible: only if memory is alive.

        Young generations are cheap. What still exists then may be a variable of a call that has
        ended. If no other variable refers to it, it is in a cycle, or an object keeps it: only a
        full collection tells.
        """
        inventory = self.inventory
        is_auto = self.collect == "auto"
        if self.collect == "full" or (is_auto and self.collects_all):
            gc.collect()
        elif self.collect != "never":
            for generation in range(2):
                if inventory.alive():
                    gc.collect(generation)
        if inventory.alive() and self.collect in ("auto", "full"):
            clear_ended_frames(inventory)
        if inventory.alive():
            self._holders = find_holders(inventory)
        explained = {k for k, holders in self._holders.items() if any(map(is_in_use, holders))}
        unexplained = [held.nbytes for held in inventory.alive() if held.key not in explained]
        is_large = sum(unexplained) >= LEAST_BYTES
        if is_auto and (inventory.is_partial or is_large):
            gc.collect()
            if inventory.alive():
                self._holders = find_holders(inventory)

    def _report(self) -> CleanupReport:
        held: dict[tuple[int | None, int, str], StillHeld] = {}
        for one in self.inventory.alive():
            # What stays whole is named as a whole.
            name = one.what if one.part is None else self.inventory.parts[one.part].name
            key = (one.part, one.key if one.part is None else 0, one.device)
            nbytes = one.nbytes + (held[key].nbytes if key in held else 0)
            holders = variables_first(self._holders.get(one.key, []))
            held[key] = StillHeld(name, nbytes, one.device, holders)
        freed = {one.device: 0 for one in held.values()} | self.inventory.freed_bytes()
        return CleanupReport(
            freed_bytes=freed,
            still_held=tuple(sorted(held.values(), key=lambda one: -one.nbytes)),
            errors=tuple(self.errors),
            duration_s=time.perf_counter() - self._started,
            before=self._before,
            after=memory_snapshot(),
        )


_LOCK = RLock()
"""Serialises releases, for milliseconds each."""
_CLOSING: dict[int, Any] = {}
"""The objects of all releases that are under way, by their ids."""


_UNDER_WAY = threading.local()
"""Its attribute ``release`` is the innermost release of each thread."""


def _outer_release() -> Release | None:
    return getattr(_UNDER_WAY, "release", None)


def _renew_lock() -> None:
    global _LOCK
    _LOCK = RLock()
    _CLOSING.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _place_of_caller() -> str:
    """Return the line of the program that called for the release; without one, the thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] not in (_PACKAGE, "contextlib", "threading", "concurrent"):
            return f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}()"
        frame = frame.f_back
    return f"in the thread {threading.current_thread().name!r}"


@early_bound
def release(
    *objects: Any,
    collect: Collect = "auto",
    trim_host: bool = True,
    empty_cache: bool = True,
    thorough: bool = False,
) -> CleanupReport:
    """Free the memory of objects in place, even if variables still refer to them.

    What you pass is emptied: any use of it raises `ReleasedError` with the line of the release, and
    a tensor has no elements. You can pass modules, tensors, optimizers, pipelines and any object
    with attributes, however deep its models lie. For a list, tuple, set or dictionary, what stands
    in it is emptied.

    Everything in it loses that one reference. If nothing else refers to it, its memory is free. If
    anything else does, such as a variable, a closure, another model or another thread, it stays
    whole and works, and the report names the holder. Frames of calls that have ended, as in a
    stored exception, are not holders; they are cleared if they keep memory alive.

    ``close()`` and the destructor of what you pass run first, once each, on the whole object; no
    other code of the objects runs. An object with ``close()`` that holds no memory, such as a file,
    is only closed. Exceptions of both are logged and listed in the report. Only KeyboardInterrupt
    and similar ones are raised, after all objects were released. During shutdown only ``close()``
    runs, because the end of the process returns the memory sooner.

    Do not release a tensor while another thread runs a method of it, as with a file or a socket.
    One lock serialises releases. It is not held while a ``close()`` or a destructor runs.

    Args:
        *objects: The objects to release, in this order. None is ignored. Without objects, caches
            are emptied and the heap is trimmed: what was held before may be free by now.
        collect: When to collect garbage. "auto": the younger generations if released memory is
            alive; all of them if more than 1 MiB is alive that no variable holds, or if there
            is memory that cannot be counted, such as packed weights. "young": only the younger
            ones. "never" or "full": never or always.
        trim_host: Whether to return unused pages of the C heap to the system (glibc), if at least
            1 MiB of the host's memory was freed.
        empty_cache: Whether to empty the caches of the devices in use, if memory of one was freed.
        thorough: Whether to clear also what torch keeps outside its allocators: compiled code,
            cuBLAS workspaces, cuFFT plans, IPC handles and pinned host memory. Also collects cycles
            that `gc.freeze` has excluded. The time is not limited.

    Returns:
        What was freed and what is still held, as measured.

    Raises:
        TypeError: An object holds no memory and has no ``close()``, or is a class, a function or a
            module of Python; the message says what to pass instead. Nothing was changed.
        ValueError: ``collect`` is invalid.
    """
    try:
        with DeferredSignals():
            work = Release(
                collect=collect, trim_host=trim_host, thorough=thorough, empty_cache=empty_cache
            )
            work.empties_all = not objects
            work.run(objects)
            report = work.finish()
    except Exception as error:
        # A destructor may call this after this package's modules were torn down.
        if not is_shutting_down():
            raise
        log(DEBUG, "not released: %r", error)
        return CleanupReport(skipped="the interpreter is shutting down")
    work.raise_interrupt()
    return report
