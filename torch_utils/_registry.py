"""What is open in this process, and the one claim by which it is closed.

Resources and open scopes register here. An entry leaves when it is closed, so the registry
holds exactly what exit still has to close, in order of creation.

There is no lock around the registry. Garbage collection may run a destructor at any
allocation, in any thread, with any lock held; so entries are added, claimed and removed by
single dictionary operations, which are atomic.
"""

from __future__ import annotations

import sys
from _thread import LockType, allocate_lock, get_ident
from os import getpid

from torch_utils._coroutines import UNAWAITED, never_ran
from torch_utils._interrupts import came_out_of, never_began
from torch_utils._runtime import DEBUG, ERROR, PHASE, early_bound, log
from torch_utils.errors import ModelInUseError

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

EXIT_WAIT_S = 5.0
"""How long exit waits for a thread that is in the middle of closing something."""
LATE_LIMIT = 1000
"""How many of the things that are opened while everything is closed are closed as well."""
LATE_MESSAGE = "more than %s were opened while everything was closed at exit; %s and others stay"


class Claim:
    """One thread's attempt to close an entry. The first that is set on the entry is the only one.

    Attributes:
        thread: Who closes.
        is_async: Whether that takes turns with other work of the same thread.
        pieces: What is left to do; see `Entry.pieces`. None before it has begun.
        succeeded: Whether the release ran and raised nothing.
        finished: Whether the entry is closed.
        waiters: Held locks, which the end lets go, of those that wait for it.
    """

    __slots__ = ("finished", "is_async", "pieces", "succeeded", "thread", "waiters")

    def __init__(self, thread: int, is_async: bool = False) -> None:
        self.thread = thread
        self.is_async = is_async
        self.pieces: Iterator[Any] | None = None
        self.succeeded = self.finished = False
        self.waiters: list[LockType] = []


class Registry:
    """Everything that is open, by the id of its owner, in order of creation."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._waiting: dict[int, Claim] = {}  # thread -> the claim whose end it waits for
        self._known_pid = 0
        self.on_new_process: list[Callable[[], None]] = []
        self.on_late_entry: Callable[[], None] | None = None
        self.after_close: Callable[[bool], None] | None = None
        """What a signal has left to do when a release has ended; told whether in a task."""
        self._late_left = LATE_LIMIT

    def __len__(self) -> int:
        return len(self._entries)

    @early_bound
    def add(self, entry: Entry) -> None:
        """Register what was just opened; it goes behind everything that is already open."""
        self._entries.pop(entry.key, None)  # A destructor that skips ours leaves its id behind.
        self._entries[entry.key] = entry
        if entry.pid != self._known_pid:
            self._known_pid = entry.pid
            for callback in self.on_new_process:
                callback()
        if PHASE.exiting and self.on_late_entry is not None:
            self.on_late_entry()

    @early_bound
    def get(self, key: int) -> Entry | None:
        """Return the entry of an owner, or None once it is closed."""
        return self._entries.get(key)

    @early_bound
    def discard(self, entry: Entry) -> None:
        """Forget an entry, unless its place was taken by a newer one."""
        if self._entries.get(entry.key) is entry:
            self._entries.pop(entry.key, None)

    @early_bound
    def open_entries(self) -> list[Entry]:
        """Return what is open, newest first."""
        for _ in range(100):
            try:
                return list(self._entries.values())[::-1]
            except RuntimeError:  # Another thread opened or closed something meanwhile.
                continue
        return list(self._entries.copy().values())[::-1]

    @early_bound
    def under_way(self, thread: int) -> list[Claim]:
        """Return what a thread is in the middle of closing."""
        claims = [entry.__dict__.get("claim") for entry in self.open_entries()]
        return [c for c in claims if c is not None and c.thread == thread and not c.finished]

    def leave_behind(self, thread: int) -> None:
        """Have exit not wait for what a thread is in the middle of closing: that hangs."""
        for entry in self.open_entries():
            claim = entry.__dict__.get("claim")
            if claim is not None and claim.thread == thread and not claim.finished:
                entry.at_exit = False

    @early_bound
    def wait(self, claim: Claim, timeout_s: float) -> None:
        """Wait until another thread has closed what it claimed.

        Returns at once where waiting could never end: when that thread waits, directly or
        through others, for the one that asks.
        """
        me = get_ident()
        lock = allocate_lock()
        lock.acquire()  # New, and nobody else's yet. clean-exit-lint: ignore[wait]
        # A signal handler or a destructor may wait in the middle of a wait.
        outer = self._waiting.get(me)
        try:
            # Announced first and looked at afterwards, here as in every other thread: of those
            # that would wait in a circle, the last one to announce it sees the whole circle.
            claim.waiters.append(lock)
            self._waiting[me] = claim
            if not claim.finished and not self._leads_to(me, claim):
                lock.acquire(timeout=timeout_s)
        finally:
            if outer is None:
                self._waiting.pop(me, None)
            else:
                self._waiting[me] = outer

    @early_bound
    def _leads_to(self, thread: int, claim: Claim) -> bool:
        blocker: Claim | None = claim
        for _ in range(len(self._waiting) + 1):
            if blocker is None or blocker.finished:
                return False
            if blocker.thread == thread:
                return True
            blocker = self._waiting.get(blocker.thread)
        return False  # A circle of others, each of which sees it and goes on.

    @early_bound
    def close_all(self) -> None:
        """Close what this process opened, newest first, including what that opens meanwhile.

        For the end of the process: no exception of any kind gets out or skips an entry. Of what
        is opened meanwhile `LATE_LIMIT` are closed: a release that opens another resource, whose
        release does so too, would never end.
        """
        pid = getpid()
        tried: set[int] = set()
        while True:
            entries = [e for e in self.open_entries() if e.serial not in tried]
            entries = [e for e in entries if e.pid == pid and e.at_exit]
            if tried or self._late_left < LATE_LIMIT:
                if entries and self._late_left == 0:
                    self._late_left = -1  # Said once.
                    log(ERROR, LATE_MESSAGE, LATE_LIMIT, entries[0].name)
                entries = entries[: max(self._late_left, 0)]
                self._late_left -= len(entries)
            if not entries:
                return
            for entry in entries:
                tried.add(entry.serial)
                try:
                    entry.close(timeout_s=EXIT_WAIT_S)
                except BaseException as error:
                    # SystemExit or KeyboardInterrupt out of one release must not keep the
                    # others from being closed, and cannot end a program that is ending.
                    log(DEBUG, "%s at exit: %r ends nothing", entry.name, error)


REGISTRY = Registry()
_SERIALS = iter(range(1, sys.maxsize))


class Entry:
    """One open thing.

    Args:
        key: The id of the owner.
        name: What messages call it.
        owner: Returns the owner, or None when it is gone (a weak reference, usually).
        release: Gives up what the owner holds. Called once, in the process that opened it.
        at_exit: Whether the end of the process closes it.
    """

    # No __slots__: the claim is ``setdefault`` on the instance dictionary, an atomic operation.
    claim: Claim

    def __init__(
        self,
        key: int,
        name: str,
        owner: Callable[[], Any],
        release: Callable[[Any], Any],
        at_exit: bool = True,
    ) -> None:
        self.key = key
        self.name = name
        self.owner = owner
        self.release = release
        self.at_exit = at_exit
        self.pid = getpid()
        self.serial = next(_SERIALS)
        self.built = True
        self.error: BaseException | None = None  # what the release raised

    @early_bound
    def is_closed(self) -> bool:
        """Say whether it is closed; the thread that is closing it still sees it open."""
        claim = self.__dict__.get("claim")
        return claim is not None and (claim.finished or claim.thread != get_ident())

    @early_bound
    def close(self, owner: Any = None, timeout_s: float = -1) -> bool:
        """Release the owner, if nobody has yet; wait for whoever is at it.

        An error out of the release is logged and kept in ``error``; only KeyboardInterrupt,
        SystemExit and their like go on to the caller, after the entry is closed. That holds for
        an interrupt of this code itself, at whichever instruction it comes: what was claimed is
        first brought to its end.

        Returns:
            True if this call ran the release and it succeeded.
        """
        mine = Claim(get_ident())
        try:
            if not self.win(mine, timeout_s):
                return False
            self.give_up(mine, owner)
            self.finish(mine)
        except BaseException:  # An interrupt, of the release or of this: first what was begun.
            self.go_on(mine, owner)
            if not PHASE.exiting:  # It cannot end a program that is ending.
                raise
        if REGISTRY.after_close is not None:
            REGISTRY.after_close(False)
        return mine.succeeded

    @early_bound
    def win(self, mine: Claim, timeout_s: float) -> bool:
        """Win the right to release, which only one claim ever gets.

        One that loses waits until the winner is done, unless that is the same thread. A fork's
        copy is only forgotten: what it stands for belongs to the parent.
        """
        if self.pid != getpid():
            REGISTRY.discard(self)
            return False
        claim = self.__dict__.setdefault("claim", mine)
        if claim is mine:
            return True
        if claim.thread != mine.thread and not claim.finished:
            REGISTRY.wait(claim, timeout_s)
        return False

    @early_bound
    def pieces(self, owner: Any) -> Iterator[Any]:
        """Return what closes it when iterated over, and can be gone on with after an exception."""
        subject = self.owner() if owner is None else owner
        return map(self.release, () if subject is None else (subject,))

    @early_bound
    def give_up(self, mine: Claim, owner: Any) -> None:
        """Do what is left to do of the release; nothing, the second time."""
        try:
            if mine.pieces is None:
                mine.pieces = self.pieces(owner)
            for result in mine.pieces:
                if type(result) in UNAWAITED:
                    raise never_ran(result)
                mine.succeeded = True
        except BaseException as error:
            # The boundary of every cleanup: an error must neither skip what comes after nor
            # replace the caller's own. KeyboardInterrupt and the like are passed on.
            if never_began(error):
                mine.pieces = None
                raise
            if came_out_of(self.release, error):
                self.error = error
                level = ERROR if self.built else DEBUG
                if type(error) is not ModelInUseError or not error._is_logged:
                    log(level, "releasing %s failed: %r", self.name, error, exc_info=error)
            if not isinstance(error, Exception):
                raise

    @early_bound
    def finish(self, mine: Claim) -> None:
        """Forget the entry, and let those who wait for it go on."""
        REGISTRY.discard(self)
        mine.finished = True
        for lock in mine.waiters:
            try:
                lock.release()
            except RuntimeError:  # Let go already, when this was interrupted.
                continue

    @early_bound
    def go_on(self, mine: Claim, owner: Any) -> None:
        """Bring to its end what an interrupt broke off; another one does not change that."""
        try:
            if self.__dict__.get("claim") is mine:
                self.give_up(mine, owner)
                self.finish(mine)
        except BaseException:  # Another interrupt: what is left first, and then that.
            self.go_on(mine, owner)
            raise
