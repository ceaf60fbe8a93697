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
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Literal, get_args

from torch_utils import _memory
from torch_utils._oom import clear_exception_frames
from torch_utils._registry import QUIET_THREADS, ensure_ran
from torch_utils._release import emptying
from torch_utils._release.graph import Graph, break_cycles
from torch_utils._release.holders import (
    Holders,
    called,
    clear_ended_frames,
    live_objects,
    objects_of,
)
from torch_utils._release.objects import (
    OTHER,
    TENSOR,
    TRAINING,
    Kinds,
    attributes_of,
    is_released,
    name_of,
    without_overrides,
)
from torch_utils._release.roots import OTHERS, Root, holds_memory, roots_of, unsupported
from torch_utils._release.storages import Held, Storages, group_by_part
from torch_utils._report import FREE_BY_NOW, CleanupReport, StillHeld
from torch_utils._runtime import (
    DEBUG,
    ERROR,
    LISTENERS,
    early_bound,
    has_gil,
    is_shutting_down,
    log,
    notify,
    private,
    whole_torch,
)
from torch_utils._signals import DeferredSignals
from torch_utils.errors import TorchUtilsError

Collect = Literal["auto", "young", "never", "full"]
LEAST_BYTES = 1 << 20
"""Less memory than this is worth neither a full garbage collection nor a trim of the heap."""
_PACKAGE = __name__.partition(".")[0]

_CLAIMED: dict[int, Release] = {}
"""The releases that are under way, by the ids of the objects that each of them empties.

No lock is held, because a garbage collection may run code of the program at any time, in any
thread, and that code may wait for another release. One step of a dictionary claims an object.
"""
_UNDER_WAY = threading.local()
"""Its attribute ``release`` is the release that calls a function of the program in a thread."""

if hasattr(os, "register_at_fork"):  # The threads of the parent do not go on in a child.
    os.register_at_fork(after_in_child=_CLAIMED.clear)


@dataclass(frozen=True)
class Options:
    """The arguments of a release; see `release`.

    Attributes:
        empties_all: Whether caches are emptied and the heap is trimmed in any case.
    """

    collect: Collect = "auto"
    trim_host: bool = True
    empty_cache: bool = True
    thorough: bool = False
    empties_all: bool = False

    def __post_init__(self) -> None:
        if self.collect not in get_args(Collect):
            raise ValueError(
                f'collect must be "auto", "young", "never" or "full", got {self.collect!r}'
            )


class Release:
    """One release: `empty` objects and `call` functions in any order, and then `report` once.

    A release that begins inside another one of this thread, such as in a ``close()``, counts as a
    part of it: both count the same memory, and the outer one collects garbage and trims.

    Attributes:
        errors: The exceptions of its steps.
    """

    def __init__(self, options: Options, place: str) -> None:
        self.errors: list[BaseException] = []
        self._options = options
        self._place = place
        self._outer: Release | None = getattr(_UNDER_WAY, "release", None)
        self._started = time.perf_counter()
        self._storages = Storages() if self._outer is None else self._outer._storages
        self._storages.alive()
        self._freed_before = dict(self._storages.freed)
        self._before = _memory.memory_snapshot()
        self._is_partial = self._has_called = False
        self._iterators: list[tuple[str, Any]] = []

    def empty(self, things: Sequence[Any], *, were_accepted: bool = False) -> None:
        """Empty objects: count their memory, close them, and take out what is in them.

        An object that another release has claimed at the time is left to that one.

        Args:
            things: The objects.
            were_accepted: Whether they were accepted before; some may be empty by now.

        Raises:
            TypeError: An object cannot be released. Nothing was changed.
        """
        if is_shutting_down():
            self._close_at_exit(things)
            return
        kinds, claimed = Kinds(), list[Any]()
        try:
            with without_overrides(whole_torch()):
                roots = self._examine(things, were_accepted, claimed, kinds)
                graph = self._count(roots, kinds)
            self._find_iterators(roots)
            closing = [root for root in roots if root.has_close or root.destructor is not None]
            if closing:
                graph = None  # It would keep what a close() drops.
                whole = {id(root) for root in closing if not self._close(root)}
                roots = [root for root in roots if id(root) not in whole]
                with without_overrides(whole_torch()):
                    graph = self._count(roots, kinds)
            self._give_up(roots, graph, kinds)
        finally:
            for thing in claimed:
                _CLAIMED.pop(id(thing), None)

    def _examine(
        self, things: Sequence[Any], were_accepted: bool, claimed: list[Any], kinds: Kinds
    ) -> list[Root]:
        """Return the objects to empty or to close, and claim each for this release."""

        def claim(thing: Any) -> bool:
            is_own = _CLAIMED.setdefault(id(thing), self) is self
            if is_own:
                claimed.append(thing)
            return is_own and not is_released(thing)

        roots = []
        for root in roots_of(things, kinds, claim=claim):
            if root.has_close or root.is_container or holds_memory(root, kinds):
                roots.append(root)
            elif root.is_passed and not were_accepted:
                raise unsupported(root.thing, OTHERS)
        return roots

    def _count(self, roots: list[Root], kinds: Kinds) -> Graph | None:
        """Count the memory to which objects lead."""
        try:
            graph = Graph(roots, kinds)
            self._is_partial |= not self._storages.add(graph, kinds)
        except Exception as error:  # Any object of the program is read.
            self.failed("the objects", error)
            return None
        return graph

    def _find_iterators(self, roots: list[Root]) -> None:
        """Find iterators of data loaders: their workers go on while something refers to them."""
        for root in roots:
            attributes = attributes_of(root.thing) if root.kind == TRAINING else {}
            workers, data = attributes.get("num_workers"), attributes.get("dataset")
            kind = private(whole_torch(), "utils.data.dataloader._MultiProcessingDataLoaderIter")
            for one in live_objects([kind]) if workers and kind is not None else ():
                if attributes_of(one).get("_dataset") is data and id(one) not in _CLAIMED:
                    name = f"an iterator of the DataLoader, with {workers} workers"
                    self._iterators.append((name, weakref.ref(one)))

    def _close(self, root: Root) -> bool:
        """Run what an object itself does at its end, while it is whole.

        Returns:
            Whether the object is to be emptied.
        """
        name, destructor = name_of(type(root.thing)), root.destructor
        if root.has_close:
            self._has_called, failures = True, len(self.errors)
            self.call(f"{name}.close()", root.close)
            # What could not be closed may be in use; what holds no memory stays what it is.
            has_failed = len(self.errors) > failures and root.kind == OTHER
            if has_failed or not holds_memory(root, Kinds(follows_functions=False)):
                return False
        if is_released(root.thing):
            return False
        if destructor is not None and root.kind != TENSOR and not root.is_container:
            if not emptying.can_bury(type(root.thing)):
                return False  # Python will call it, on the whole object.
            self._has_called = True
            self.call(f"{name}.__del__()", partial(destructor, root.thing))
        return True

    def _give_up(self, roots: list[Root], graph: Graph | None, kinds: Kinds) -> None:
        """Take out what is in objects, and drop it."""
        trash: list[Any] = []
        with without_overrides(whole_torch()):
            for root in roots:
                try:
                    if root.kind == TENSOR:
                        emptying.empty_tensor(root.thing, root.name, trash)
                    elif root.is_container:
                        emptying.drop_attributes(root.thing, trash, partial(_is_memory, kinds))
                    else:
                        is_shared = graph is not None and graph.shares_dictionary(root.thing)
                        name = f"this {root.name}"
                        emptying.bury(
                            root.thing, name, self._place, trash, shares_dictionary=is_shared
                        )
                except BaseException as error:  # Each step runs, whatever the others raise.
                    self.failed(root.name, error)
        QUIET_THREADS.append(threading.get_ident())
        self.call("the parts", partial(self._drop, trash, graph))
        QUIET_THREADS.remove(threading.get_ident())

    def _drop(self, trash: list[Any], graph: Graph | None) -> None:
        """Drop what was taken out, and break the reference cycles in it."""
        trash.clear()
        if graph is not None:
            rest = graph.drop()
            if rest and self._storages.alive():
                break_cycles(rest)

    def _close_at_exit(self, things: Sequence[Any]) -> None:
        """Call ``close()`` only."""
        for root in roots_of(things, Kinds()):
            if root.has_close and _CLAIMED.setdefault(id(root.thing), self) is self:
                self.call(f"{name_of(type(root.thing))}.close()", root.close)

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
            # The error keeps this frame, and with it the function's arguments.
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

    def report(self, *, after_memory_error: bool = False) -> CleanupReport:
        """Collect garbage, trim the heap and empty the caches as requested, and report.

        Args:
            after_memory_error: Whether frames were cleared that may have held memory in cycles.
        """
        if is_shutting_down():
            return CleanupReport(
                errors=tuple(self.errors),
                duration_s=time.perf_counter() - self._started,
                skipped="the program is ending, and the system takes the memory back",
            )
        options, is_outermost = self._options, self._outer is None
        if is_outermost or options.thorough or options.collect == "full":
            self._give_back(after_memory_error)
        alive = self._storages.alive()
        still_held = _describe(alive)
        alive_iterators = [each for each in self._iterators if each[1]() is not None]
        finders = Holders([find for _, find in alive_iterators], called)
        for number, (name, _) in enumerate(alive_iterators):
            still_held += (StillHeld(name, 0, "host", partial(finders.of, number)),)
        lent_bytes = self._storages.take_lent_bytes() if is_outermost else 0
        freed = self._storages.freed.copy()
        freed.subtract(self._freed_before)
        for held in still_held:
            freed[held.device] += 0  # It is named, even if nothing of it was freed.
        report = CleanupReport(
            freed_bytes=dict(freed),
            still_held=still_held,
            lent_bytes=lent_bytes,
            errors=tuple(self.errors),
            duration_s=time.perf_counter() - self._started,
            before=self._before,
            after=_memory.memory_snapshot(),
        )
        if LISTENERS and is_outermost:
            notify("release", report=report)
        return report

    def _give_back(self, after_memory_error: bool) -> None:
        options, storages = self._options, self._storages
        if options.thorough:
            _memory.clear_caches_of_torch()
        self.call("autocast's cache", _memory.clear_autocast_cache)
        self._collect_garbage(after_memory_error)
        storages.alive()  # Counts what is gone by now.
        freed = storages.freed
        is_all = options.empties_all or after_memory_error
        is_all = is_all or options.thorough or options.collect == "full"
        if options.empty_cache and (is_all or freed.keys() - {"host"}):
            _memory.empty_caches()
        # Weights that were mapped from a file count too: the heap has what the model computed.
        is_large = freed["host"] >= LEAST_BYTES
        if options.trim_host and (is_all or is_large or self._is_partial or self._has_called):
            _memory.trim_host()

    def _collect_garbage(self, after_memory_error: bool) -> None:
        """Collect garbage as little as possible: only what the counting cannot tell.

        Young generations are cheap. What still exists then may be a variable of a call that has
        ended, or part of a cycle outside of what was passed; a full collection ends that.
        """
        collect, alive = self._options.collect, self._storages.alive
        is_auto = collect == "auto"
        if collect == "full" or (is_auto and after_memory_error):
            gc.collect()
        elif collect != "never":
            if not has_gil() and threading.current_thread() is not threading.main_thread():
                gc.collect()  # The thread that made an object drops it, unless it is collected.
            for generation in range(2):
                if alive():
                    gc.collect(generation)
        unexplained = 0
        if alive() and collect in ("auto", "full"):
            unexplained = clear_ended_frames(alive())
        if is_auto and (self._is_partial or unexplained >= LEAST_BYTES):
            gc.collect()


def _is_memory(kinds: Kinds, thing: Any) -> bool:
    root = Root(thing, "", kinds.of(type(thing)))
    return gc.is_tracked(thing) and not is_released(thing) and holds_memory(root, kinds)


def _describe(alive: list[Held]) -> tuple[StillHeld, ...]:
    """Describe memory that is alive, the largest first. What stays whole is one entry."""
    groups = group_by_part(alive)
    holders = Holders(groups, objects_of)
    described = []
    for number, group in enumerate(groups):
        first, nbytes = group[0], sum(one.nbytes for one in group)
        name = first.what if first.part is None else first.part.name
        described.append(
            StillHeld(name, nbytes, first.device, partial(_holders_of, holders, number, group))
        )
    return tuple(sorted(described, key=lambda one: -one.nbytes))


def _holders_of(holders: Holders, number: int, group: list[Held]) -> tuple[str, ...]:
    if all(one.is_gone() for one in group):
        return (FREE_BY_NOW,)
    return holders.of(number)


def place_of_caller() -> str:
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
    in it is emptied; the container stays.

    Everything in it loses that one reference. If nothing else refers to it, its memory is free. If
    anything else does, such as a variable, a closure, another model or another thread, it stays
    whole and works, and the report names the holder. Reference cycles in it are broken. Frames of
    calls that have ended, as in a stored exception, are not holders; they are cleared if they keep
    its memory alive.

    ``close()`` and the destructor of what you pass run first, once each, on the whole object; no
    other code of the objects runs. An object with ``close()`` that holds no memory, such as a file,
    is only closed. Exceptions of both are logged and listed in the report. If ``close()`` raises,
    the object stays whole, because it may be in use; a module, an optimizer or a tensor is emptied
    nevertheless. Only KeyboardInterrupt and similar ones are raised, after all objects were
    released. During shutdown only ``close()`` runs, because the end of the process returns the
    memory sooner.

    Do not release a tensor while another thread runs a method of it, as with a file or a socket.
    Threads may release at the same time; no lock is held. What two of them pass is released by one.

    Args:
        *objects: The objects to release, in this order. None is ignored. Without objects, caches
            are emptied and the heap is trimmed: what was held before may be free by now.
        collect: When to collect garbage. "auto": the younger generations if released memory is
            alive; all of them if more than 1 MiB is alive and it cannot be told why, or if there
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
            options = Options(collect, trim_host, empty_cache, thorough, empties_all=not objects)
            work = Release(options, place_of_caller())
            work.empty(objects)
            report, errors = work.report(), work.errors
            del work  # A signal in the destructors of weak references would be lost.
    except Exception as error:
        # A destructor may call this after this package's modules were torn down.
        if not is_shutting_down():
            raise
        log(DEBUG, "not released: %r", error)
        return CleanupReport(skipped="the interpreter is shutting down")
    for failure in errors:
        if not isinstance(failure, Exception):  # Such as KeyboardInterrupt.
            raise failure
    return report
