"""The registry of open resources, and the claim that closes each of them exactly once.

Resources and open scopes register here in order of creation and leave when they are closed. The
exit callback closes the rest.

The registry has no lock. The garbage collector may run a destructor at any allocation, in any
thread, with any lock held. So single dictionary operations, which are atomic, add and remove
entries. A thread claims an entry by a lock that it acquires without blocking.
"""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from os import getpid

from torch_utils._coroutines import UNAWAITED, unawaited_error
from torch_utils._deferral import DeferredSignals
from torch_utils._runtime import ERROR, PHASE, early_bound, log

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

EXIT_WAIT_S = 5.0
"""How long the exit callback waits for another thread that is closing a resource."""
LATE_LIMIT = 1000
"""How many resources that are opened during the exit callback are closed as well."""


class _Raises:
    """Raise an error in a destructor, so that Python passes it to `sys.unraisablehook`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @early_bound
    def __del__(self) -> None:
        raise self.error


class Registry:
    """All open entries by the id of their owner, in order of creation."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._waiting: dict[int, Entry] = {}  # by the thread that waits
        self._known_pid = 0
        self._late = 0  # opened during the exit callback
        self.on_new_process: Callable[[], None] | None = None
        self.on_late_entry: Callable[[], None] | None = None

    @early_bound
    def add(self, entry: Entry) -> None:
        """Register a new entry behind all others."""
        self._entries.pop(entry.key, None)  # Left by a destructor that did not call ours.
        self._entries[entry.key] = entry
        if entry.pid != self._known_pid:
            self._known_pid = entry.pid
            if self.on_new_process is not None:
                self.on_new_process()
        if PHASE.exiting and self.on_late_entry is not None:
            self._late += 1
            if self._late <= LATE_LIMIT:
                self.on_late_entry()
                return
            entry.at_exit = False
            if self._late == LATE_LIMIT + 1:
                log(
                    ERROR,
                    "more than %s were opened at exit; the others stay open",
                    LATE_LIMIT,
                )

    @early_bound
    def get(self, key: int) -> Entry | None:
        """Return the entry of an owner, or None if it is closed."""
        return self._entries.get(key)

    @early_bound
    def discard(self, entry: Entry) -> None:
        """Remove an entry, unless a newer one has taken its place."""
        if self._entries.get(entry.key) is entry:
            self._entries.pop(entry.key, None)

    @early_bound
    def open_entries(self) -> list[Entry]:
        """Return the open entries, newest first."""
        return list(self._entries.copy().values())[::-1]

    def skip_at_exit(self, thread: int) -> None:
        """Exclude the entries that a hanging thread is closing from the exit callback."""
        for entry in self.open_entries():
            if entry.thread == thread:
                entry.at_exit = False

    @early_bound
    def wait(self, entry: Entry, timeout_s: float) -> None:
        """Wait until another thread has closed an entry, unless that would be a deadlock."""
        me = get_ident()
        outer = self._waiting.get(me)  # A signal handler may wait during a wait.
        try:
            # Every thread announces its wait before it looks for a cycle, so the last thread of a
            # cycle sees all of it.
            self._waiting[me] = entry
            if not self._leads_to(me, entry):
                entry.wait(timeout_s)
        finally:
            if outer is None:
                self._waiting.pop(me, None)
            else:
                self._waiting[me] = outer

    @early_bound
    def _leads_to(self, thread: int, entry: Entry | None) -> bool:
        for _ in range(len(self._waiting) + 1):
            if entry is None or entry.thread is None:
                return False
            if entry.thread == thread:
                return True
            entry = self._waiting.get(entry.thread)
        return False  # A cycle of other threads, which detect it themselves.

    @early_bound
    def close_all(self) -> None:
        """Close all entries of this process, newest first, including those opened meanwhile.

        Any exception goes to `sys.unraisablehook` and skips no entry. At most `LATE_LIMIT` entries
        that are opened meanwhile are closed: a release that opens a resource of its own kind would
        never end.
        """
        pid = getpid()
        tried: set[Entry] = set()
        while True:
            entries = [e for e in self.open_entries() if e not in tried]
            entries = [e for e in entries if e.pid == pid and e.at_exit]
            if not entries:
                return
            for entry in entries:
                tried.add(entry)
                try:
                    entry.close(timeout_s=EXIT_WAIT_S)
                except BaseException as error:
                    # A SystemExit or KeyboardInterrupt must not skip the other entries, and the
                    # program is ending already.
                    _Raises(error)


REGISTRY = Registry()


@early_bound
def _could_not_begin(error: BaseException) -> bool:
    """Return whether the recursion limit stopped a release before its first frame."""
    traceback = error.__traceback__ if isinstance(error, RecursionError) else None
    module = ""
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__") or "?"
        if module.partition(".")[0] not in ("torch_utils", "contextlib"):
            return False
        traceback = traceback.tb_next
    return bool(module)


class Entry:
    """One open resource.

    Args:
        key: The id of the owner.
        name: Its name in messages.
        owner: Returns the owner, or None if it was collected; usually a weak reference.
        release: Releases what the owner holds. Called once, in the process that opened it.
        at_exit: Whether the exit callback closes it.

    Attributes:
        thread: The thread that closes it.
        raised: The id of the release's exception. The exception itself would keep frames alive.
    """

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
        self.thread: int | None = None
        self.raised: int | None = None
        self._is_finished = False
        self._claim = allocate_lock()

    @early_bound
    def is_closed(self) -> bool:
        """Return whether it is closed. The thread that is closing it still sees it open."""
        return self._is_finished or (self._claim.locked() and self.thread != get_ident())

    @early_bound
    def close(self, owner: Any = None, timeout_s: float = -1) -> bool:
        """Release the owner once; wait if another thread is releasing it.

        Args:
            owner: The owner, for callers whose weak reference to it is dead.
            timeout_s: How long to wait in seconds; forever if negative. The release itself does
                not wait, and a thread that waits for this one is not waited for.

        Returns:
            True if this call ran the release.

        Raises:
            BaseException: The release raised it. The entry is closed nevertheless.
        """
        if self.pid != getpid():
            REGISTRY.discard(self)  # In a forked child: the resource belongs to the parent.
            return False
        with DeferredSignals():
            if self._claim.acquire(blocking=False):
                try:
                    return self._run_release(owner)
                finally:
                    self._claim.release()
        if self.thread != get_ident() and timeout_s != 0:
            REGISTRY.wait(self, timeout_s)
        return False

    @early_bound
    def _run_release(self, owner: Any) -> bool:
        if self._is_finished:
            return False
        self.thread = get_ident()
        try:
            subject = self.owner() if owner is None else owner
            result = None if subject is None else self.release(subject)
            if type(result) in UNAWAITED:
                raise unawaited_error(result)
        except BaseException as error:
            self.raised = id(error)
            if not _could_not_begin(error):
                self._finish()
            raise
        self._finish()
        return True

    @early_bound
    def _finish(self) -> None:
        self._is_finished = True
        REGISTRY.discard(self)

    @early_bound
    def wait(self, timeout_s: float) -> None:
        """Wait until the thread that claimed it has finished."""
        if self._claim.acquire(timeout=timeout_s):
            self._claim.release()
