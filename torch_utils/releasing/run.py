"""release: take the memory out of objects whose variables live on, and prove it.

A ``with`` block cannot unbind the caller's variable, and neither can a function. So the
weights are taken out of the object itself, and afterwards the object says that they were.
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
from torch_utils._events import tell
from torch_utils._runtime import ERROR, early_bound, is_shutting_down, log, whole_torch
from torch_utils.errors import TorchUtilsError
from torch_utils.memory import MemorySnapshot, empty_caches, memory_snapshot
from torch_utils.memory import trim_host as trim_host_heap
from torch_utils.oom import Handled
from torch_utils.releasing.caches import clear_caches_of_torch
from torch_utils.releasing.holders import SEARCH_S, Holders, find_holders
from torch_utils.releasing.internals import without_overrides
from torch_utils.releasing.plan import plan
from torch_utils.releasing.storages import Held, Inventory, Target
from torch_utils.releasing.tensors import TensorTarget, is_any_kept, settle
from torch_utils.report import CleanupReport, StillHeld

Collect = Literal["auto", "never", "full"]
IN_A_THREAD = "another thread, perhaps, that may be computing with it"
LENDER = "the array or buffer that it was made from"
_PACKAGE = __name__.partition(".")[0]


def check_collect(collect: str) -> None:
    """Refuse a policy that does not exist, before anything is touched."""
    if collect not in ("auto", "never", "full"):
        raise ValueError(f'collect must be "auto", "never" or "full", not {collect!r}')


class Release:
    """One release: what was given up so far, and what came of it."""

    def __init__(
        self, *, collect: Collect, trim_host: bool, thorough: bool, search_s: float = SEARCH_S
    ) -> None:
        check_collect(collect)
        if type(search_s) not in (int, float) or not 0 <= search_s < float("inf"):
            raise ValueError(f"search_s must be a number of seconds from 0 on, not {search_s!r}")
        self.handled: Handled = Handled(sys.exc_info()[1])  # What is older does not belong to this.
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
        """Give objects up: all is understood, closed and counted before memory is taken.

        Args:
            objects: What to release.
            is_again: See `plan`.

        Raises:
            TypeError: An object's kind is not supported.
        """
        lock = _LOCK  # A fork in a ``close()`` gives the child another one.
        has_lock = lock.acquire(timeout=0 if is_shutting_down() else LOCK_WAIT_S)
        try:
            with self.under_way():
                with _no_collections():
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
                except Exception as error:  # What is in attributes may be anything.
                    self.failed("other modules", error)

    def _give_up(self, targets: list[Target]) -> None:
        for is_tensor, group in groupby(targets, lambda t: isinstance(t, TensorTarget)):
            with without_overrides(whole_torch()) if is_tensor else nullcontext():
                for target in group:
                    try:
                        if target.closes or not is_shutting_down():
                            target.give_up(self._place)
                    except BaseException as error:
                        # The boundary between one object's cleanup and the next one's: each is
                        # given up, whatever the others raise. `raise_interrupt` passes on what is
                        # not an Exception.
                        self.failed(target.name, error)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Have what this thread releases meanwhile, in a ``close()`` say, count for this one."""
        if not self._started:  # Not before: a scope may be entered before torch is imported.
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
        """Note an error of one step, and log it once."""
        self.errors.append(error)
        # An error of this package says it all; of another one the traceback is needed.
        trace = None if isinstance(error, TorchUtilsError) else error
        log(ERROR, "releasing %s failed: %r", name, error, exc_info=trace)
        if not is_shutting_down():  # The report must not keep what was in its frames.
            self.handled.clear_frames(error)

    def raise_interrupt(self) -> None:
        """Raise a KeyboardInterrupt or its like, now that everything was released."""
        for error in self.errors:
            if not isinstance(error, Exception):
                raise error

    def finish(self) -> CleanupReport:
        """Collect, trim and empty what the policy asks for, and report.

        A release within another leaves that to the outer one, which then counts for both.
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
                tell("release", report=report)
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
        settle()
        if self._thorough:
            clear_caches_of_torch()
        self._collect_garbage()
        if self._inventory or self._collect == "full" or self._thorough:
            empty_caches()
            if self._trim_host:
                trim_host_heap()

    def _collect_garbage(self) -> None:
        """Climb only as far as needed: each generation costs more than the one before."""
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
        # What a variable leads to is not garbage, and looking for it there would be in vain.
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


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the many objects that are made here from setting off full collections."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _place_of_caller() -> str:
    """Say where the program asked for the release: the nearest frame outside this package."""
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
    """Give back what objects hold, in place; the caller's variables may live on.

    Takes modules (and what wraps one: SentenceTransformer, CrossEncoder, transformers models,
    compiled modules), tensors, optimizers, faiss indexes, containers of these, any object with
    ``close()``, and objects that hold these in their attributes (a pipeline, a cache, a dataclass);
    docs/memory.md has the table. Finding out what to do runs none of their code.
    Afterwards a module, optimizer or index raises `ReleasedError` on every use, and a tensor is
    empty. Weights and submodules that a live model shares stay as they are.

    Errors of a ``close()`` are collected in the report and logged; only KeyboardInterrupt and its
    like go on to the caller, after everything else was released. While the program ends only
    ``close()`` methods are called: the end of the process gives the memory back sooner than
    anything done before it.

    One lock serialises releases: of several threads that release one object, one does it, and the
    others find nothing to do. After `LOCK_WAIT_S` seconds a thread goes on without the lock,
    because a ``close()`` may be waiting for that thread.

    Args:
        *objects: What to release, in this order. None is nothing to release.
        collect: Whether to collect garbage. "auto": only if something that was given up is
            still alive, the youngest generations first, and the full heap only if no variable
            leads to it, so that it may be garbage; "never"; "full": always.
        trim_host: Return the C heap's unused pages to the system (glibc).
        search_s: How long to look for what still holds memory that was given up, in seconds.
            Raise this to have more distant holders named.
        thorough: Also clear what torch keeps outside its allocators, where it is loaded and in
            use: compiled code, cuBLAS workspaces, cuFFT plans, IPC handles, pinned host memory;
            and collect cycles that `gc.freeze` has put aside. Takes as long as it takes.

    Returns:
        What was freed and what is still held, measured.

    Raises:
        TypeError: An object is of a kind that it does not know, or a generator or iterator. Says
            what to pass instead. Nothing was touched.
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
        # A destructor may call this when the modules it is made of are gone already.
        if not is_shutting_down():
            raise
        return CleanupReport(errors=(error,), skipped="the interpreter is being taken apart")
    work.raise_interrupt()
    return report


def storage_bytes(thing: Any) -> dict[str, int]:
    """Count the storages that belong to an object, by "host" and device; touches nothing.

    Empty for what `release` does not know. Walks the heap twice, at most.
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
