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
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any, Literal, get_args

from torch_utils import _memory
from torch_utils._oom import clear_exception_frames
from torch_utils._registry import QUIET_THREADS, ensure_ran
from torch_utils._release import objects
from torch_utils._release.counting import (
    Held,
    Holders,
    Inventory,
    clear_ended_frames,
    find_holders,
    without_overrides,
)
from torch_utils._release.objects import Root, is_released, name_of
from torch_utils._report import CleanupReport, StillHeld, is_variable
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


class Release:
    """One release and its state.

    Attributes:
        inventory: The memory that it gives up; what is still held can be asked of it later.
        errors: The exceptions of its steps.
        empties_all: Whether caches are emptied and the heap is trimmed in any case.
        collects_all: Whether frames were cleared that held memory in cycles.
    """

    def __init__(
        self, *, collect: Collect, trim_host: bool, thorough: bool, empty_cache: bool = True
    ) -> None:
        if collect not in get_args(Collect):
            raise ValueError(f'collect must be "auto", "young", "never" or "full", got {collect!r}')
        self.collect, self.trim_host, self.thorough = collect, trim_host, thorough
        self.empty_cache = empty_cache
        self.errors: list[BaseException] = []
        self.empties_all = self.collects_all = self._has_called = False
        self._place = _place_of_caller()

    def start(self) -> None:
        """Measure the memory, unless this has started.

        A release that begins inside another one of this thread, such as in a ``close()``, counts as
        a part of it: both count the same memory, and the outer one collects garbage and trims.
        """
        if not hasattr(self, "_before"):  # Not in `__init__`: torch may be imported later.
            self._outer: Release | None = getattr(_UNDER_WAY, "release", None)
            self._started = time.perf_counter()
            self.inventory = Inventory() if self._outer is None else self._outer.inventory
            self.inventory.alive()
            self._freed_before = dict(self.inventory.freed)
            self._before = _memory.memory_snapshot()

    def run(self, things: Sequence[Any], *, is_again: bool = False) -> None:
        """Release objects: examine all of them, close them, and then empty them.

        The lock is held while objects are examined and emptied, not while code of the program
        runs, which may wait for a thread that releases something else. An object that another
        release is closing at the time is left to that one.

        Args:
            things: The objects to release.
            is_again: Whether they were accepted before; some may be empty by now.

        Raises:
            TypeError: An object cannot be released. Nothing was changed.
        """
        if is_shutting_down():
            self._close_at_exit(things)
            return
        trash: list[Any] = []
        roots: list[Root] = []
        try:
            with _LOCK, without_overrides(whole_torch()):
                roots = self._examine(things, is_again)
                for root in roots:
                    _CLOSING[id(root.thing)] = root.thing
            for root in roots:
                destructor = objects.find_in_class(type(root.thing), "__del__")
                if root.has_close or destructor is not None:
                    self._close(root, destructor)
            with _LOCK, without_overrides(whole_torch()):
                for root in roots:
                    if not root.is_found or is_released(root.thing):
                        continue
                    try:
                        if self.inventory.kind_of(type(root.thing)) == objects.TENSOR:
                            objects.empty_tensor(root.thing, root.name, trash)
                        else:
                            objects.bury(root.thing, f"this {root.name}", self._place, trash)
                    except BaseException as error:  # As in `call`.
                        self.failed(root.name, error)
        finally:
            for root in roots:
                _CLOSING.pop(id(root.thing), None)
        QUIET_THREADS.append(threading.get_ident())
        self.call("the parts", trash.clear)
        QUIET_THREADS.remove(threading.get_ident())

    def _close_at_exit(self, things: Sequence[Any]) -> None:
        """Call ``close()`` only. The lock is not needed, and a thread that has it may hang."""
        for root in objects.roots_of(things, self.inventory.kind_of):
            if root.has_close and id(root.thing) not in _CLOSING:
                _CLOSING[id(root.thing)] = root.thing
                self.call(f"{name_of(type(root.thing))}.close()", root.close)

    def _examine(self, things: Sequence[Any], is_again: bool) -> list[Root]:
        """Count the memory of objects, and return those to close or to empty."""
        roots = []
        for root in objects.roots_of(things, self.inventory.kind_of):
            if id(root.thing) not in _CLOSING:
                roots.append(root)
        try:
            self.inventory.count(roots)
        except Exception as error:  # Any object of the program is read.
            self.failed("the objects", error)
            return roots
        chosen = []
        for root in roots:
            if root.is_found or root.has_close:
                chosen.append(root)
            elif root.is_passed and not is_again:
                raise objects.unsupported(root.thing, objects.OTHERS)
        return chosen

    def _close(self, root: Root, destructor: Any) -> None:
        """Run what an object itself does at its end, while it is whole."""
        name = name_of(type(root.thing))
        if root.has_close:
            self._has_called = True
            self.call(f"{name}.close()", root.close)
            # If it holds nothing now, it stays what it is.
            closed = Root(root.thing, root.name)
            with _LOCK, without_overrides(whole_torch()):
                self.call(root.name, partial(Inventory(follows_functions=False).count, [closed]))
            root.is_found = closed.is_found
        if destructor is not None and root.is_found:
            if objects.layout_of(type(root.thing))[0] is None:
                root.is_found = False  # Python will call it, on the whole object.
            elif not is_released(root.thing):
                self._has_called = True
                self.call(f"{name}.__del__()", partial(destructor, root.thing))

    def call(self, name: str, function: Any, *, awaits: bool = False) -> Any:
        """Call a function of the program; return its result.

        Each step runs, whatever the others raise. What is not an Exception is raised at the end.

        Args:
            name: What is logged if it fails.
            function: The function.
            awaits: Whether the caller awaits the result. If not, the function may not be one that
                returns a coroutine or a generator.
        """
        outer = getattr(_UNDER_WAY, "release", None)
        _UNDER_WAY.release = self
        try:
            result = function()
            return result if awaits else ensure_ran(result)
        except BaseException as error:
            # As said above. The error keeps this frame, and with it the function's arguments.
            del function
            self.failed(name, error)
            return None
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

    def finish(self) -> CleanupReport:
        """Collect garbage, trim the heap and empty the caches as requested, and report."""
        if is_shutting_down():
            return CleanupReport(
                errors=tuple(self.errors),
                duration_s=time.perf_counter() - self._started,
                skipped="the program is ending, and the system takes the memory back",
            )
        is_outermost, holders = self._outer is None, {}
        if is_outermost or self.thorough or self.collect == "full":
            holders = self._give_back()
        alive = self.inventory.alive()
        still_held = self._still_held(alive, holders) if alive else ()
        freed = self.inventory.freed.copy()
        freed.subtract(self._freed_before)
        for held in still_held:
            freed[held.device] += 0  # It is named, even if nothing of it was freed.
        report = CleanupReport(
            freed_bytes=dict(freed),
            still_held=still_held,
            errors=tuple(self.errors),
            duration_s=time.perf_counter() - self._started,
            before=self._before,
            after=_memory.memory_snapshot(),
        )
        if LISTENERS and is_outermost:
            notify("release", report=report)
        return report

    def _give_back(self) -> Holders:
        if self.thorough:
            _memory.clear_caches_of_torch()
        torch: Any = whole_torch()
        if torch is not None:  # In this thread it keeps copies of weights.
            self.call("autocast's cache", torch.clear_autocast_cache)
        holders = self._collect_garbage()
        # Weights that were mapped from a file count too: the heap has what the model computed.
        freed = self.inventory.freed
        is_all = self.empties_all or self.thorough or self.collect == "full"
        if self.empty_cache and (is_all or freed.keys() - {"host"}):
            _memory.empty_caches()
        is_large = freed["host"] >= LEAST_BYTES
        if self.trim_host and (is_all or is_large or self.inventory.is_partial or self._has_called):
            _memory.trim_host()
        return holders

    def _collect_garbage(self) -> Holders:
        """Collect garbage as little as possible: only if memory is alive. Return what holds it.

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
        holders = find_holders(inventory) if inventory.alive() else {}
        unexplained_bytes = 0
        for held in inventory.alive():
            # Of what a variable holds, a garbage collection frees nothing.
            if not any(" variable " in holder for holder in holders.get(held.key, ())):
                unexplained_bytes += held.nbytes
        if is_auto and (inventory.is_partial or unexplained_bytes >= LEAST_BYTES):
            gc.collect()
            holders = find_holders(inventory) if inventory.alive() else {}
        return holders

    def _still_held(self, alive: list[Held], holders: Holders) -> tuple[StillHeld, ...]:
        """Describe memory that is alive, the largest first. What stays whole is one entry."""
        held: dict[tuple[int, str], StillHeld] = {}
        for one in alive:
            name = one.what if one.part is None else one.part.name
            key = (one.key if one.part is None else id(one.part), one.device)
            nbytes = one.nbytes + (held[key].nbytes if key in held else 0)
            names = dict.fromkeys(holders.get(one.key, ()))
            variables_first = tuple(sorted(names, key=lambda name: not is_variable(name)))
            held[key] = StillHeld(name, nbytes, one.device, variables_first)
        return tuple(sorted(held.values(), key=lambda one: -one.nbytes))


_LOCK = RLock()
"""Serialises releases, for milliseconds each."""
_CLOSING: dict[int, Any] = {}
"""The objects of all releases that are under way, by their ids."""
_UNDER_WAY = threading.local()
"""Its attribute ``release`` is the release that calls a function of the program in a thread."""


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
            work.start()
            work.run(objects)
            report = work.finish()
    except Exception as error:
        # A destructor may call this after this package's modules were torn down.
        if not is_shutting_down():
            raise
        log(DEBUG, "not released: %r", error)
        return CleanupReport(skipped="the interpreter is shutting down")
    for failure in work.errors:
        if not isinstance(failure, Exception):  # Such as KeyboardInterrupt.
            raise failure
    return report
