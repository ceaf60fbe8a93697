"""What is open in this process, and the claim by which each thing is closed exactly once.

Resources and open scopes register here. An entry leaves when it is closed, so the registry holds
what exit still has to close, in order of creation.

There is no lock around the registry. The garbage collector may run a destructor at any allocation,
in any thread, with any lock held. So entries are added and removed by single operations on a
dictionary, which are atomic, and an entry is claimed by a lock that nobody waits for.
"""

from __future__ import annotations

from _thread import allocate_lock, get_ident
from os import getpid

from torch_utils._coroutines import UNAWAITED, never_ran
from torch_utils._deferral import DeferredSignals
from torch_utils._runtime import ERROR, PHASE, early_bound, log

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

EXIT_WAIT_S = 5.0
"""How long exit waits for a thread that is in the middle of closing something."""
LATE_LIMIT = 1000
"""How many of the things that are opened while everything is closed are closed as well."""


class _Raises:
    """Raises an error where Python passes it to `sys.unraisablehook`: in a destructor."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @early_bound
    def __del__(self) -> None:
        raise self.error


class Registry:
    """Everything that is open, by the id of its owner, in order of creation."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._waiting: dict[int, Entry] = {}  # thread -> what it waits for
        self._known_pid = 0
        self._late = 0  # how many were opened while everything was closed
        self.on_new_process: Callable[[], None] | None = None
        self.on_late_entry: Callable[[], None] | None = None

    @early_bound
    def add(self, entry: Entry) -> None:
        """Register what was just opened; it goes behind everything that is already open."""
        self._entries.pop(entry.key, None)  # A destructor that skips ours leaves its id behind.
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
                log(ERROR, "more than %s were opened while everything was closed", LATE_LIMIT)

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
        return list(self._entries.copy().values())[::-1]

    def leave_behind(self, thread: int) -> None:
        """Have exit not wait for what a thread is in the middle of closing, because it hangs."""
        for entry in self.open_entries():
            if entry.thread == thread:
                entry.at_exit = False

    @early_bound
    def wait(self, entry: Entry, timeout_s: float) -> None:
        """Wait until another thread has closed an entry, unless that thread waits for this one."""
        me = get_ident()
        outer = self._waiting.get(me)  # A signal handler may wait in the middle of a wait.
        try:
            # Announced first and looked at afterwards, here as in every other thread: of those
            # that would wait in a circle, the last one to announce it sees the whole circle.
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
        return False  # A circle of others, each of which sees it.

    @early_bound
    def close_all(self) -> None:
        """Close what this process opened, newest first, including what that opens meanwhile.

        For the end of the process: an exception of any kind goes to `sys.unraisablehook` and
        skips no entry. Of what is opened meanwhile `LATE_LIMIT` are closed, because a release
        that opens a resource whose release opens another one would never end.
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
                    # SystemExit or KeyboardInterrupt out of one release must not keep the others
                    # from being closed, and cannot end a program that is ending.
                    _Raises(error)


REGISTRY = Registry()


@early_bound
def _could_not_begin(error: BaseException) -> bool:
    """Say whether, near the recursion limit, not even the first frame of a release could run."""
    traceback = error.__traceback__ if isinstance(error, RecursionError) else None
    module = ""
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__") or "?"
        if module.partition(".")[0] not in ("torch_utils", "contextlib"):
            return False
        traceback = traceback.tb_next
    return bool(module)


class Entry:
    """One open thing.

    Args:
        key: The id of the owner.
        name: What messages call it.
        owner: Returns the owner, or None when it is gone (a weak reference, usually).
        release: Gives up what the owner holds. Called once, in the process that opened it.
        at_exit: Whether the end of the process closes it.

    Attributes:
        thread: The thread that closes it.
        raised: The id of what the release raised. The error itself would keep its frames alive.
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
        """Say whether it is closed; the thread that is closing it still sees it open."""
        return self._is_finished or (self._claim.locked() and self.thread != get_ident())

    @early_bound
    def close(self, owner: Any = None, timeout_s: float = -1) -> bool:
        """Release the owner, if nobody has yet; otherwise wait for the thread that is at it.

        Args:
            owner: Only needed where a weak reference to it is gone already.
            timeout_s: How long to wait; without an end if negative. It does not wait in the release
                itself, nor for a thread that waits for this one.

        Returns:
            True if this call ran the release.

        Raises:
            BaseException: What the release raised. The entry is closed all the same.
        """
        if self.pid != getpid():
            REGISTRY.discard(self)  # A fork's copy: what it stands for belongs to the parent.
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
                raise never_ran(result)
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
        """Wait until the thread that has claimed it is done."""
        if self._claim.acquire(timeout=timeout_s):
            self._claim.release()
