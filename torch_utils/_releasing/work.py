"""One release under way: what was given up so far, and what came of it."""

from __future__ import annotations

import gc
import time
from _thread import get_ident
from contextvars import ContextVar
from typing import Any, Literal
from weakref import ref

from torch_utils._events import tell
from torch_utils._releasing import in_use
from torch_utils._releasing.counting import count_beyond
from torch_utils._releasing.holders import SEARCH_S, Holders, find_holders
from torch_utils._releasing.other_caches import clear_other_caches
from torch_utils._releasing.storages import LENDER, Held, Inventory
from torch_utils._releasing.target import Target
from torch_utils._releasing.tombstone import caller
from torch_utils._runtime import ERROR, current_task, is_shutting_down, log, whole_torch
from torch_utils.memory import MemorySnapshot, empty_caches, memory_snapshot
from torch_utils.memory import trim_host as trim_host_heap
from torch_utils.oom import Handled
from torch_utils.report import CleanupReport, StillHeld

IN_A_THREAD = "another thread, perhaps, that may be computing with it"
Collect = Literal["auto", "never", "full"]


def check_search(search_s: float) -> None:
    """Refuse a time that is none, before anything is touched."""
    if type(search_s) not in (int, float) or not 0 <= search_s < float("inf"):
        raise ValueError(f"search_s must be a number of seconds from 0 on, not {search_s!r}")


def check_collect(collect: str) -> None:
    """Refuse a policy that does not exist, before anything is touched."""
    if collect not in ("auto", "never", "full"):
        raise ValueError(f'collect must be "auto", "never" or "full", not {collect!r}')


class Release:
    """One release under way: what was given up so far, and what came of it."""

    def __init__(
        self, *, collect: Collect, trim_host: bool, thorough: bool, search_s: float = SEARCH_S
    ) -> None:
        self._handled = Handled()
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
        self._planned: list[Target] = []
        self._uncounted: list[Target] = []
        # A close() that this calls may release what the object holds: that belongs to this one.
        self._outer = _enclosing()
        self._caller = caller_key()
        self._under_way = False
        self._was_broken_off = False
        self.is_idle = collect == "auto" and not thorough  # Until there is something to do.

    def begin(self) -> None:
        """Have what the caller releases from here on, until `end`, belong to this release."""
        self._under_way = True
        _UNDER_WAY.set(ref(self))

    def end(self) -> None:
        """Belong to nothing any more."""
        self._under_way = False
        if _UNDER_WAY.get() == ref(self):
            _UNDER_WAY.set(None if self._outer is None else ref(self._outer))

    def run(self, targets: list[Target]) -> None:
        """Give up what was planned: all is counted before the first is touched.

        Empties the list. Nothing is raised, not even an interrupt, which `raise_interrupt` passes
        on: it keeps nothing from being given up, at whichever instruction it comes.
        """
        outermost = not self._under_way
        self.is_idle = self.is_idle and not targets
        try:
            try:
                self.begin()
                self._give_up_all(targets)
            finally:
                for target in targets:  # None, unless something came in between.
                    target.drop_claim(self._caller)
                if outermost:
                    self.end()
        except BaseException as error:
            # An interrupt of this code itself. What is left of the list goes on; after what may be
            # an error of this code, and come again, once.
            if outermost:
                self.end()
            self.failed("what was planned", error)
            is_second, self._was_broken_off = self._was_broken_off, True
            if not (is_second and isinstance(error, Exception)):
                self.run(targets)

    def _give_up_all(self, targets: list[Target]) -> None:
        if self._planned is not targets:  # Otherwise this goes on where an interrupt came.
            self._uncounted = list(targets)
            self._planned = targets
        while self._uncounted and not is_shutting_down():
            target = self._uncounted[0]
            self._insist(target.name, lambda t=target: self._count(t))
            del self._uncounted[0]
        if not is_shutting_down():
            self._isolated("what they refer to", lambda: count_beyond(self._inventory))
        while targets:
            self._give_up(targets[0])
            targets[0].drop_claim(self._caller)
            targets[:1] = targets[0].left_over()

    def _count(self, target: Target) -> None:
        target.claim(self._caller)
        if target.is_mine:
            target.count(self._inventory)

    def _give_up(self, target: Target) -> None:
        if target.is_mine and (target.closes or not is_shutting_down()):
            self._insist(target.name, lambda: target.give_up(self._place))

    def _insist(self, name: str, action: Any) -> None:
        """Do something, and once more if an interrupt left it half done.

        The program's own code has run or not even begun, and the target knows which; all else
        can be done twice.
        """
        before = len(self.interrupts())
        self._isolated(name, action)
        if len(self.interrupts()) > before:
            self._isolated(name, action)

    def _isolated(self, name: str, action: Any) -> None:
        try:
            logged = action()
            if logged is not None:
                self._keep(logged)
        except BaseException as error:
            # The boundary between one object's cleanup and the next one's: each target is given up,
            # whatever the others raise. `raise_interrupt` passes on what is no Exception.
            self.failed(name, error)

    def failed(self, name: str, error: BaseException) -> None:
        """Take note of an error in one target, and log it once."""
        log(ERROR, "releasing %s failed: %r", name, error, exc_info=error)
        self._keep(error)

    def _keep(self, error: BaseException) -> None:
        """Keep an error for the report, which must not keep what was in its frames."""
        self.errors.append(error)
        if not is_shutting_down():
            self._handled.clear_frames(error)

    def finish(self) -> CleanupReport:
        """Collect, trim and empty what the policy asks for, and report.

        A release within another leaves that to the outer one, which then counts for both.
        """
        self.end()
        try:
            return self._report()
        finally:
            self._inventory.free()

    def _report(self) -> CleanupReport:
        if is_shutting_down():
            return CleanupReport(
                errors=tuple(self.errors),
                duration_s=time.perf_counter() - self._started,
                skipped="the program is ending, and the system takes the memory back",
            )
        if self._outer is None:
            self._give_back()
        freed_bytes, alive = self._inventory.tally()
        still_held = self._still_held(alive)
        if self._outer is not None:
            self._outer._inventory.absorb(self._inventory)
        report = CleanupReport(
            freed_bytes=freed_bytes,
            still_held=still_held,
            errors=tuple(self.errors),
            duration_s=time.perf_counter() - self._started,
            before=self._before,
            after=self._before if self.is_idle else memory_snapshot(),
        )
        if self._outer is None:  # Otherwise that one counts for both.
            tell("release", report=report)
        return report

    def _still_held(self, alive: list[Held]) -> tuple[StillHeld, ...]:
        in_a_thread = (IN_A_THREAD,) if in_use.is_any_kept() else ()
        still_held = [(held, self._holders.of(held) or in_a_thread) for held in alive]
        still_held += [(held, (LENDER,)) for held in self._inventory.still_lent()]
        return tuple(StillHeld(h.what, h.nbytes, h.device, holders) for h, holders in still_held)

    def _give_back(self) -> None:
        in_use.settle()
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
                if not self._survivors():
                    return
                gc.collect(generation)
        survivors = self._survivors()
        self._holders = find_holders(whole_torch(), survivors, self._search_s)
        # What a variable leads to is no garbage, and looking for it there would be in vain.
        if self._collect == "auto" and not self._holders.explain(survivors):
            gc.collect()
            self._inventory.forget_gone()

    def _survivors(self) -> list[Held]:
        self._inventory.forget_gone()
        return self._inventory.alive()

    def interrupts(self) -> list[BaseException]:
        """Return those of the errors that are KeyboardInterrupt, SystemExit and their like."""
        return [error for error in self.errors if not isinstance(error, Exception)]

    def raise_interrupt(self) -> None:
        """Pass on an interrupt, now that everything was released."""
        for error in self.interrupts():
            raise error


_UNDER_WAY: ContextVar[ref[Release] | None] = ContextVar("release_under_way", default=None)
"""The innermost release under way, as far as the context knows; `_enclosing` asks the release."""


def _enclosing() -> Release | None:
    """Return the release that the caller is in the middle of.

    A task or a thread that is started there inherits the context, but is a caller of its own,
    and may well outlive that release.
    """
    reference = _UNDER_WAY.get()
    outer = None if reference is None else reference()
    if outer is None or not outer._under_way or outer._caller != caller_key():
        return None
    return outer


def caller_key() -> tuple[int, Any]:
    """Tell callers apart: the thread, and the asyncio task where there is one."""
    return get_ident(), current_task()
