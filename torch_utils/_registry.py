"""What is open in this process, and the one claim by which it is closed.

Resources and open scopes register here. An entry leaves when it is closed, so the registry
holds exactly what exit still has to close, in order of creation.

There is no lock around the registry. Garbage collection may run a destructor at any
allocation, in any thread, with any lock held; so entries are added, claimed and removed by
single dictionary operations, which are atomic.
"""

from __future__ import annotations

import os
import sys
from _thread import LockType, allocate_lock, get_ident

from torch_utils._runtime import DEBUG, PHASE, Phase, log

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

EXIT_WAIT_S = 5.0
"""How long exit waits for a thread that is in the middle of closing something."""


class Attempt:
    """One thread's attempt to close an entry. The first attempt to claim it is the only one."""

    __slots__ = ("done", "thread")

    def __init__(
        self,
        _ident: Callable[[], int] = get_ident,
        _lock: Callable[[], LockType] = allocate_lock,
    ) -> None:
        self.thread = _ident()
        self.done = _lock()
        self.done.acquire()  # Held until the release has ended; waiting means acquiring it.


class Registry:
    """Everything that is open, by the id of its owner, in order of creation."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._waiting: dict[int, Attempt] = {}  # thread -> the attempt it waits for
        self._known_pid = 0
        self.on_new_process: list[Callable[[], None]] = []
        self.on_late_entry: Callable[[], None] | None = None
        self._releasing: dict[int, int] = {}  # thread -> releases that it is in the middle of
        self._postponed: tuple[int, Callable[[], None]] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry, _getpid: Callable[[], int] = os.getpid) -> None:
        """Register what was just opened; it goes behind everything that is already open."""
        self._entries.pop(entry.key, None)  # A destructor that skips ours leaves its id behind.
        self._entries[entry.key] = entry
        if entry.pid != self._known_pid:
            self._known_pid = entry.pid
            for callback in self.on_new_process:
                callback()
        if PHASE.exiting and self.on_late_entry is not None:
            self.on_late_entry()

    def get(self, key: int) -> Entry | None:
        """Return the entry of an owner, or None once it is closed."""
        return self._entries.get(key)

    def discard(self, entry: Entry) -> None:
        """Forget an entry, unless its place was taken by a newer one."""
        if self._entries.get(entry.key) is entry:
            self._entries.pop(entry.key, None)

    def open_entries(self) -> list[Entry]:
        """Return what is open, newest first."""
        for _ in range(100):
            try:
                return list(self._entries.values())[::-1]
            except RuntimeError:  # Another thread opened or closed something meanwhile.
                continue
        return list(self._entries.copy().values())[::-1]

    def wait(
        self, attempt: Attempt, timeout_s: float, _ident: Callable[[], int] = get_ident
    ) -> None:
        """Wait until another thread's attempt has ended.

        Returns at once where waiting could never end: when that thread waits, directly or
        through others, for the one that asks.
        """
        me = _ident()
        blocker: Attempt | None = attempt
        while blocker is not None:
            if blocker.thread == me:
                return
            blocker = self._waiting.get(blocker.thread)
        self._waiting[me] = attempt
        try:
            if attempt.done.acquire(timeout=timeout_s):
                attempt.done.release()
        finally:
            self._waiting.pop(me, None)

    def is_releasing_here(self, _ident: Callable[[], int] = get_ident) -> bool:
        """Whether the calling thread is in the middle of a release."""
        return _ident() in self._releasing

    def postpone(self, action: Callable[[], None], _ident: Callable[[], int] = get_ident) -> None:
        """Have the calling thread do something when it has ended what it releases."""
        self._postponed = (_ident(), action)

    def begin_release(self, _ident: Callable[[], int] = get_ident) -> None:
        """Note that the calling thread begins a release."""
        me = _ident()
        self._releasing[me] = self._releasing.get(me, 0) + 1

    def end_release(self, _ident: Callable[[], int] = get_ident) -> None:
        """Note its end; after the outermost, do what a signal handler has postponed."""
        me = _ident()
        depth = self._releasing.get(me, 1) - 1
        if depth:
            self._releasing[me] = depth
            return
        self._releasing.pop(me, None)
        if self._postponed is not None and self._postponed[0] == me:
            (_, action), self._postponed = self._postponed, None
            action()

    def close_all(self, _getpid: Callable[[], int] = os.getpid) -> None:
        """Close what this process opened, newest first, including what that opens meanwhile.

        For the end of the process: no exception of any kind gets out or skips an entry.
        """
        pid = _getpid()
        tried: set[int] = set()
        while True:
            entries = [e for e in self.open_entries() if e.serial not in tried]
            entries = [e for e in entries if e.pid == pid and e.at_exit]
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
    attempt: Attempt

    def __init__(
        self,
        key: int,
        name: str,
        owner: Callable[[], Any],
        release: Callable[[Any], None],
        at_exit: bool = True,
    ) -> None:
        self.key = key
        self.name = name
        self.owner = owner
        self.release = release
        self.at_exit = at_exit
        self.pid = os.getpid()
        self.serial = next(_SERIALS)
        self.built = True
        self.error: BaseException | None = None

    def is_closed(self, _ident: Callable[[], int] = get_ident) -> bool:
        """Say whether it is closed; the thread that is closing it still sees it open."""
        attempt = self.__dict__.get("attempt")
        return attempt is not None and attempt.thread != _ident()

    def claim(
        self,
        timeout_s: float = -1,
        _getpid: Callable[[], int] = os.getpid,
        _attempt: Callable[[], Attempt] = Attempt,
        _registry: Registry = REGISTRY,
    ) -> bool:
        """Win the right to release, which only one call ever gets; `finish` must follow.

        A call that loses waits until the winner is done, unless that is itself. A fork's copy
        is only forgotten: what it stands for belongs to the parent.
        """
        if self.pid != _getpid():
            _registry.discard(self)
            return False
        mine = _attempt()
        _registry.begin_release()  # First: a signal between here and the release must wait.
        attempt = self.__dict__.setdefault("attempt", mine)
        if attempt is mine:
            return True
        _registry.end_release()
        if attempt.thread != mine.thread:
            _registry.wait(attempt, timeout_s)
        return False

    def finish(self, _registry: Registry = REGISTRY) -> None:
        """Forget the entry, and let those who waited for it go on."""
        _registry.discard(self)
        self.attempt.done.release()
        _registry.end_release()

    def close(
        self,
        owner: Any = None,
        timeout_s: float = -1,
        _phase: Phase = PHASE,
        _log: Callable[..., None] = log,
    ) -> bool:
        """Release the owner, if nobody has yet.

        An error out of the release is logged and kept in ``error``; only KeyboardInterrupt,
        SystemExit and their like go on to the caller, after the entry is closed.

        Returns:
            True if this call ran the release and it succeeded.
        """
        if not self.claim(timeout_s):
            return False
        try:
            subject = self.owner() if owner is None else owner
            if subject is not None:
                self.release(subject)
            return subject is not None
        except BaseException as error:
            # The boundary of every cleanup: an error must neither skip what comes after nor
            # replace the caller's own. KeyboardInterrupt and the like are passed on below.
            self.error = error
            level = 40 if self.built else 10
            _log(level, "releasing %s failed: %r", self.name, error, exc_info=error)
            if not isinstance(error, Exception) and not _phase.exiting:
                raise
            return False
        finally:
            self.finish()
