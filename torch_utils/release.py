"""release: take the memory out of objects whose variables live on, and prove it.

A ``with`` block cannot unbind the caller's variable, and neither can a function. So the
weights are taken out of the object itself, and afterwards the object says that they were.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal

from torch_utils._dismantle import plan
from torch_utils._holders import SEARCH_S, Holders, find_holders
from torch_utils._runtime import ERROR, is_shutting_down, loaded_torch, log
from torch_utils._steps import Step
from torch_utils._storages import Inventory
from torch_utils._thorough import clear_other_caches
from torch_utils._tombstone import caller
from torch_utils.memory import MemorySnapshot, empty_caches, memory_snapshot
from torch_utils.memory import trim_host as trim_host_heap
from torch_utils.report import CleanupReport, StillHeld

__all__ = ["Collect", "release", "safe_tensor_cleanup"]

Collect = Literal["auto", "never", "full"]


def release(
    *objects: Any,
    collect: Collect = "auto",
    trim_host: bool = True,
    thorough: bool = False,
    search_s: float = SEARCH_S,
    _down: Callable[[], bool] = is_shutting_down,
    _report: type[CleanupReport] = CleanupReport,
) -> CleanupReport:
    """Give back what objects hold, in place; the caller's variables may live on.

    Takes modules (and what wraps one: SentenceTransformer, CrossEncoder, transformers models,
    compiled modules), tensors, optimizers, faiss indexes, containers of these, and any object
    with ``close()``. Afterwards a module, optimizer or index raises `ReleasedError` on every
    use, and a tensor is empty. Weights and submodules that a live model shares stay as they are.

    Errors out of the objects' own code are collected in the report and logged; only
    KeyboardInterrupt and its like go on to the caller, after everything else was released.
    While the program ends only ``close()`` methods are called: the end of the process gives
    the memory back sooner than anything done before it.

    Args:
        *objects: What to release, in this order. None is nothing to release.
        collect: Whether to collect garbage. "auto": only if something that was given up is
            still alive, the youngest generations first, and the full heap only if no variable
            leads to it, so that it may be garbage; "never"; "full": always.
        trim_host: Return the C heap's unused pages to the system (glibc).
        search_s: How long to look for who still holds what was given up, in seconds, where
            something is. The search starts at the running functions' variables and follows
            references from there; raise this to have more distant holders named.
        thorough: Also clear what torch keeps outside its allocators, where it is loaded and in
            use: compiled code, cuBLAS workspaces, cuFFT plans, IPC handles, pinned host memory;
            and collect cycles that `gc.freeze` has put aside. Takes as long as it takes.

    Returns:
        What was freed and what is still held, measured.

    Raises:
        TypeError: An object is of a kind that it does not know. Nothing was touched.
        ValueError: ``collect`` is none of the three.
    """
    try:
        check_collect(collect)
        steps = plan(objects)
        work = Release(collect=collect, trim_host=trim_host, thorough=thorough, search_s=search_s)
        work.run(steps)
        report = work.finish()
    except Exception as error:
        # A destructor may call this when the modules it is made of are gone already.
        if not _down():
            raise
        return _report(errors=(error,), skipped="the interpreter is being taken apart")
    work.raise_interrupt()
    return report


def check_collect(collect: str) -> None:
    """Refuse a policy that does not exist, before anything is touched."""
    if collect not in ("auto", "never", "full"):
        raise ValueError(f'collect must be "auto", "never" or "full", not {collect!r}')


class Release:
    """One release under way: what was given up so far, and what came of it."""

    def __init__(
        self, *, collect: Collect, trim_host: bool, thorough: bool, search_s: float = SEARCH_S
    ) -> None:
        self._search_s = search_s
        self._collect = collect
        self._trim_host = trim_host
        self._thorough = thorough
        self._inventory = Inventory()
        self._holders = Holders()
        self._started = time.perf_counter()
        self._before: MemorySnapshot = memory_snapshot()
        self._place = caller()
        self.errors: list[BaseException] = []
        # A close() that this calls may release what the object holds: that belongs to this one.
        self._outer = _UNDER_WAY.get()
        _UNDER_WAY.set(self)

    def run(self, steps: list[Step]) -> None:
        """Give up what was planned: all is counted before the first is touched."""
        if not is_shutting_down():
            for step in steps:
                self._isolated(step.name, lambda s=step: s.count(self._inventory))
        for step in steps:
            self._give_up(step)

    def _give_up(self, step: Step) -> None:
        if step.closes or not is_shutting_down():
            self._isolated(step.name, lambda: step.give_up(self._place))

    def _isolated(self, name: str, action: Any) -> None:
        try:
            action()
        except BaseException as error:
            # The boundary between one object's cleanup and the next one's: each step runs,
            # whatever the others raise. `raise_interrupt` passes on what is no Exception.
            self.failed(name, error)

    def failed(self, name: str, error: BaseException) -> None:
        """Take note of an error in one step, and log it once."""
        self.errors.append(error)
        log(ERROR, "releasing %s failed: %r", name, error, exc_info=error)

    def finish(self) -> CleanupReport:
        """Collect, trim and empty what the policy asks for, and report.

        A release within another leaves that to the outer one, which then counts for both.
        """
        _UNDER_WAY.set(self._outer)
        if is_shutting_down():
            return CleanupReport(
                errors=tuple(self.errors),
                duration_s=time.perf_counter() - self._started,
                skipped="the program is ending, and the system takes the memory back",
            )
        if self._outer is not None:
            self._outer._inventory.absorb(self._inventory)
        else:
            self._give_back()
        return CleanupReport(
            freed_bytes=self._inventory.freed_bytes(),
            still_held=self._still_held(),
            errors=tuple(self.errors),
            duration_s=time.perf_counter() - self._started,
            before=self._before,
            after=memory_snapshot(),
        )

    def _still_held(self) -> tuple[StillHeld, ...]:
        return tuple(
            StillHeld(held.what, held.nbytes, held.device, self._holders.of(held))
            for held in self._inventory.alive()
        )

    def _give_back(self) -> None:
        if self._thorough:
            clear_other_caches()
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
                if not self._inventory.alive():
                    return
                gc.collect(generation)
        survivors = self._inventory.alive()
        self._holders = find_holders(loaded_torch(), survivors, self._search_s)
        # What a variable leads to is no garbage, and looking for it there would be in vain.
        if self._collect == "auto" and not self._holders.explain(survivors):
            gc.collect()
        self._inventory.alive()  # Forgets what is gone, before the heap is trimmed.

    def raise_interrupt(self) -> None:
        """Pass on a KeyboardInterrupt or SystemExit, now that everything was released."""
        for error in self.errors:
            if not isinstance(error, Exception):
                raise error


_UNDER_WAY: ContextVar[Release | None] = ContextVar("release_under_way", default=None)


def safe_tensor_cleanup(
    tensor_attr_name: str, obj: Any, *, _log: Callable[..., None] = log
) -> bool:
    """Set ``obj.<name>`` to None and so give up the tensor, or tensors, that it held.

    Works on plain attributes, ``__slots__``, properties with a setter or deleter, registered
    parameters and buffers, and whatever the attribute holds: a tensor, or a list, tuple or
    dictionary of them. For destructors and shutdown paths: never raises, imports nothing,
    initialises nothing. As safe across threads as setting an attribute is.

    The tensor itself stays whole for others that refer to it; its memory goes with the last of
    them. To take the memory although a variable lives on, use `release`.

    Args:
        tensor_attr_name: The attribute's name.
        obj: Its owner; None and half-built owners are fine.

    Returns:
        True if there was something. False where there was nothing, or where the owner refuses
        to be changed; it is then as it was.
    """
    try:
        if getattr(obj, tensor_attr_name, None) is None:
            return False
        try:
            setattr(obj, tensor_attr_name, None)
        except Exception as error:
            # A property without a setter, a frozen owner, a validating __setattr__: each
            # raises what it likes. A deleter may still do.
            _log(10, "%s refuses None: %r", tensor_attr_name, error)
        if getattr(obj, tensor_attr_name, None) is not None:
            delattr(obj, tensor_attr_name)
        return getattr(obj, tensor_attr_name, None) is None
    except Exception as error:
        # Destructors call this, on owners that may be half built or half taken apart.
        _log(10, "%s not cleaned up: %r", tensor_attr_name, error)
        return False
