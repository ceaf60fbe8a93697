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
from _thread import RLock, get_ident
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from torch_utils._deferral import DeferredSignals
from torch_utils._registry import UNAWAITED, unawaited_error
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
from torch_utils.errors import TorchUtilsError
from torch_utils.memory import MemorySnapshot, clear_caches_of_torch, empty_caches, memory_snapshot
from torch_utils.memory import trim_host as trim_host_heap
from torch_utils.oom import Handled
from torch_utils.releasing.holders import find_holders
from torch_utils.releasing.objects import find_in_class
from torch_utils.releasing.plan import plan
from torch_utils.releasing.storages import Held, Inventory, without_overrides
from torch_utils.releasing.targets import CLAIMS, Claim, Closer, Target, bury
from torch_utils.report import CleanupReport, StillHeld, variables_first

Collect = Literal["auto", "never", "full"]
USER = "an object that was not released"
LENDER = "the array or buffer that it was made from"
TRIM_BYTES = 1 << 20
"""Less freed memory of the host than this is not worth the milliseconds of a trim."""
_PACKAGE = __name__.partition(".")[0]


def check_collect(collect: str) -> None:
    """Check the value of ``collect``."""
    if collect not in ("auto", "never", "full"):
        raise ValueError(f'collect must be "auto", "never" or "full", got {collect!r}')


@dataclass
class Release:
    """One release and its state."""

    collect: Collect
    trim_host: bool
    thorough: bool
    empty_cache: bool = True

    def __post_init__(self) -> None:
        check_collect(self.collect)
        self.handled = Handled(sys.exc_info()[1])  # Older exceptions do not count.
        self._holders: dict[int, list[str]] = {}
        self._place = _place_of_caller()
        self.errors: list[BaseException] = []
        self.frees_more = False  # memory that is not counted
        self._started = 0.0
        self._before = MemorySnapshot()

    def run(self, objects: Sequence[Any], *, is_again: bool = False) -> None:
        """Release objects: examine and count all of them first.

        The lock is held while objects are examined and emptied. It is not held while code of the
        program runs, which may wait for a thread that releases something else.

        Args:
            objects: The objects to release.
            is_again: See `plan`.

        Raises:
            TypeError: An object is not supported. Nothing was changed.
        """
        claims: list[Claim] = []
        closers: list[Closer] = []
        trash: list[Any] = []
        pid, is_first = os.getpid(), True
        with self.under_way():
            try:
                while is_first or closers:
                    while closers and os.getpid() == pid:
                        self._call(closers.pop(0))
                    if os.getpid() != pid:
                        return  # What was called has forked, and the parent goes on.
                    with _lock():
                        targets = plan(objects, is_again=is_again or not is_first)
                        if is_first:
                            self._count(targets)
                        closers = _claim_closers(targets, claims)
                        if not closers:
                            self._give_up(targets, trash)
                        del targets  # What they refer to must not look as if others used it.
                    is_first = False  # What is called may change the objects.
            finally:
                for claim in claims:
                    CLAIMS.pop(id(claim.thing), None)
            trash.clear()

    def _call(self, closer: Closer) -> None:
        name, thing, method = closer
        called = CLAIMS[id(thing)].called
        if method in called:  # By a release within a method that was called before.
            return
        called.add(method)
        self._inventory.is_partial = True
        try:
            if method == "close":
                result = thing.close()
            else:
                result = find_in_class(type(thing), method)(thing)
            if type(result) in UNAWAITED:
                raise unawaited_error(result)
        except BaseException as error:  # As in `_give_up`.
            self.failed(name, error)
        if method == "__del__" and is_shutting_down():
            bury(thing, name, self._place, [])  # It must not run again.

    def _count(self, targets: list[Target]) -> None:
        if not is_shutting_down():
            with without_overrides(whole_torch()):
                for target in targets:
                    self._inventory.counts_staying = target.stays
                    try:
                        target.count(self._inventory)
                    except BaseException as error:  # As in `_give_up`.
                        self.failed(target.name, error)
                try:
                    self._inventory.add_other_modules()
                except Exception as error:  # Attributes may hold anything.
                    self.failed("other modules", error)

    def _give_up(self, targets: list[Target], trash: list[Any]) -> None:
        if is_shutting_down():
            return  # The end of the process returns the memory sooner.
        with without_overrides(whole_torch()):
            for target in sorted(targets, key=lambda target: -target.depth()):
                try:
                    freed = None if target.stays else target.give_up(self._place, trash)
                    if freed:
                        self._inventory.add_freed("host", freed)
                except BaseException as error:
                    # Each object is released, whatever the others raise. `raise_interrupt` raises
                    # what is not an Exception later.
                    self.failed(target.name, error)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Count nested releases of this thread, such as in a ``close()``, as part of this one."""
        if not self._started:  # Not in `__init__`: a scope may start before torch is imported.
            self._started = time.perf_counter()
            self._before = memory_snapshot()
            self._inventory = Inventory()
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
        level = DEBUG if type(error).__name__ == "CancelledError" else ERROR
        log(level, "releasing %s failed: %r", name, error, exc_info=trace)
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
                if LISTENERS:
                    notify("release", report=report)
            else:
                outer._inventory.absorb(self._inventory)
            return report
        finally:
            self._inventory.free()

    def _report(self) -> CleanupReport:
        freed_bytes, alive, lent = self._inventory.tally()
        held = [(h, self._holders.get(h.key) or [USER] * h.stays) for h in alive]
        held += [(h, [LENDER]) for h in lent]
        return CleanupReport(
            freed_bytes=freed_bytes,
            still_held=tuple(
                StillHeld(h.what, h.nbytes, h.device, variables_first(who)) for h, who in held
            ),
            errors=tuple(self.errors),
            duration_s=time.perf_counter() - self._started,
            before=self._before,
            after=memory_snapshot(),
        )

    def _give_back(self) -> None:
        if self.thorough:
            clear_caches_of_torch()
        self._collect_garbage()
        # Weights that were mapped from a file count too: the heap has what the model computed.
        freed_bytes = self._inventory.freed_bytes()
        devices = [name for name in freed_bytes if name != "host"]
        is_all = self.frees_more or self.thorough or self.collect == "full"
        if self.empty_cache and (is_all or devices):
            empty_caches(None if is_all else devices)
        is_large = freed_bytes.get("host", 0) >= TRIM_BYTES or self._inventory.is_partial
        if self.trim_host and (is_all or is_large):
            trim_host_heap()

    def _collect_garbage(self) -> None:
        """Collect older generations only if needed, because each costs more than the one before."""
        if self.collect == "full":
            gc.collect()
        elif self.collect == "auto":
            for generation in range(2):
                if self._survivors():
                    gc.collect(generation)
        survivors = self._survivors()
        alive = self._inventory.alive()
        if not alive:
            return
        self._holders = find_holders(whole_torch(), alive)
        # Survivors that a variable leads to are not garbage.
        is_found = all(held.key in self._holders for held in survivors)
        if self.collect == "auto" and not is_found:
            gc.collect()
            self._inventory.forget_gone()

    def _survivors(self) -> list[Held]:
        self._inventory.forget_gone()
        return [held for held in self._inventory.alive() if not held.stays]


LOCK_WAIT_S = 10.0
_LOCK = RLock()
_NO_FULL = 1 << 30
_THRESHOLDS: list[tuple[int, int, int]] = []
"""The program's thresholds of the garbage collector while the lock is held."""


@contextmanager
def _lock() -> Iterator[None]:
    """Hold the lock that serialises releases; during shutdown only if it is free.

    A thread holds it for milliseconds. Only a garbage collection in the middle can make that
    longer, by a destructor that waits for a thread that waits here. The many objects of a large
    release would set off a full collection, so Python's threshold for that is raised meanwhile.
    """
    lock = _LOCK  # A fork gives the child a new lock.
    has_lock = lock.acquire(timeout=0 if is_shutting_down() else LOCK_WAIT_S)
    if not has_lock and not is_shutting_down():
        log(
            ERROR, "another thread has been releasing for %g s; not waiting any longer", LOCK_WAIT_S
        )
    thresholds = gc.get_threshold()
    try:
        if has_lock:
            _THRESHOLDS.append(thresholds)
            gc.set_threshold(*thresholds[:2], _NO_FULL)
        yield
    finally:
        if has_lock:
            if gc.get_threshold()[2] == _NO_FULL:  # Another thread may have set them meanwhile.
                gc.set_threshold(*thresholds)
            del _THRESHOLDS[-1:]
            lock.release()


def _claim_closers(targets: list[Target], claims: list[Claim]) -> list[Closer]:
    """Return what to call before the targets are emptied, and add new claims to ``claims``."""
    closers: list[Closer] = []
    for closer in (c for target in targets if not target.stays for c in target.closers()):
        claim = CLAIMS.get(id(closer.thing))
        if claim is None:
            claim = CLAIMS[id(closer.thing)] = Claim(closer.thing, get_ident())
            claims.append(claim)
        if closer.method not in claim.called:
            closers.append(closer)
    return closers


class _UnderWay(threading.local):
    """The innermost release of each thread."""

    release: Release | None = None


_UNDER_WAY = _UnderWay()


def _renew_lock() -> None:
    global _LOCK
    _LOCK = RLock()
    CLAIMS.clear()
    for thresholds in _THRESHOLDS[:1]:  # Another thread of the parent was releasing.
        gc.set_threshold(*thresholds)
    _THRESHOLDS.clear()


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
    empty_cache: bool = True,
    thorough: bool = False,
) -> CleanupReport:
    """Free the memory of objects in place, even if variables still refer to them.

    Supports modules (also SentenceTransformer, CrossEncoder, transformers models and compiled
    modules), tensors, optimizers, faiss indexes, containers of these and objects with ``close()``.
    Objects that hold any of these in attributes, such as a pipeline, are supported as well;
    docs/memory.md has a table. No code of the objects runs except ``close()`` and the destructors
    of modules, optimizers and loaders, each once, before anything is emptied. A ``close()`` must be
    idempotent: an object that contains another one may call its ``close()`` as well.

    What is passed, also in a list, tuple, set or dictionary, is emptied in place: a module,
    optimizer or index then raises `ReleasedError` on use, and a tensor is empty. A tensor that an
    object merely contains is let go: other references keep it. A module that an object contains is
    emptied too, unless an object outside refers to it. Variables do not count.

    Do not release a tensor while another thread runs a method of it, as with a file or a socket.

    Exceptions of a ``close()`` or a destructor are logged and listed in the report. Only
    KeyboardInterrupt and similar ones are raised, after all objects were released. During shutdown
    only these are called, because the end of the process returns the memory sooner.

    One lock serialises releases. It is not held while a ``close()`` or a destructor runs.

    Args:
        *objects: The objects to release, in this order. None is ignored.
        collect: When to collect garbage. "auto": only if released memory is still alive, younger
            generations first, and all generations only if no variable leads to that memory.
            "never" or "full": never or always.
        trim_host: Whether to return unused pages of the C heap to the system (glibc), if at least
            `TRIM_BYTES` of the host's memory were freed.
        empty_cache: Whether to empty the caches of the devices on which memory was freed.
        thorough: Whether to clear also what torch keeps outside its allocators: compiled code,
            cuBLAS workspaces, cuFFT plans, IPC handles and pinned host memory. Also collects cycles
            that `gc.freeze` has excluded. The time is not limited.

    Returns:
        What was freed and what is still held, as measured.

    Raises:
        TypeError: An object is not supported; the message says what to pass instead. Nothing was
            changed.
        ValueError: ``collect`` is invalid.
    """
    try:
        with DeferredSignals():
            work = Release(
                collect=collect, trim_host=trim_host, thorough=thorough, empty_cache=empty_cache
            )
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
