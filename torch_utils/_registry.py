"""What is open, the claim that closes each resource exactly once, and the exit callback.

Resources and open scopes register here in order of creation and leave when they are closed. The
exit callback closes the rest, while every module is intact. ``import torch_utils`` registers it
with atexit, which runs callbacks last-in first-out. So the program's own callbacks, which are
registered later, can still use the resources.

The registry has no lock. The garbage collector may run a destructor at any allocation, in any
thread, with any lock held. So single dictionary operations, which are atomic, add and remove
entries. A thread claims an entry by a lock that it acquires without blocking.
"""

from __future__ import annotations

import atexit
from _thread import allocate_lock, get_ident
from os import getpid
from sys import modules
from time import monotonic, sleep
from types import AsyncGeneratorType, CoroutineType, GeneratorType

from torch_utils._runtime import ERROR, Phase, early_bound, log
from torch_utils._signals import DeferredSignals

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

EXIT_WAIT_S = 5.0
"""How long the exit callback waits in all for other threads, in seconds: those that are closing
resources, loading hosted models, or holding leases."""
NESTED_WAIT_S = 10.0
"""How long a release waits for another thread's release, which may be waiting for this one."""
MOST_PASSES = 1000
"""How often the exit callback closes what was opened while it closed other resources."""
QUIET_THREADS: list[int] = []
"""Threads that drop the parts of released objects. Destructors in these give no warning."""


@early_bound
def ensure_ran(result: Any, instead: str = "") -> Any:
    """Return the result of a call, unless the call has not run yet.

    Other awaitables than these, such as tasks, run on their own.

    Args:
        result: The result.
        instead: What to do instead, for the message; the advice for cleanup functions by default.

    Raises:
        TypeError: It is a coroutine or a generator.
    """
    if type(result) not in (CoroutineType, AsyncGeneratorType, GeneratorType):
        return result
    if type(result) is CoroutineType:
        result.close()  # Otherwise Python warns that it was never awaited.
    instead = instead or "use a plain function, or in a scope `async with` and callback()"
    raise TypeError(
        f"{result.__qualname__}() has to be awaited or iterated, so it did not run; {instead}"
    )


def _report_unraisable(error: BaseException, where: str) -> None:
    """Raise an error in a destructor, so that Python passes it to `sys.unraisablehook`."""

    def destructor(self: object) -> None:
        raise error

    destructor.__qualname__ = where  # Python prints it.
    type("Ending", (), {"__del__": destructor})()


@early_bound
class Registry:
    """All open entries by the id of their owner, in order of creation."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self.get = self._entries.get  # Returns the entry of an owner, or None if it is closed.
        self._known_pid = 0
        self.exit_ends: float = 0.0  # until when the exit callback waits, by `monotonic`

    def add(self, entry: Entry) -> None:
        """Register a new entry behind all others."""
        self._entries.pop(entry.key, None)  # Left by a destructor that did not call ours.
        self._entries[entry.key] = entry
        # A child of multiprocessing skips atexit before Python 3.13, but runs these finalizers:
        # with a negative priority, after it has joined its own children. A child of a fork server
        # may not know yet that it is one.
        process: Any = modules.get("multiprocessing.process")
        util: Any = modules.get("multiprocessing.util")
        is_new = process is not None and util is not None and entry.pid != self._known_pid
        if is_new and process.parent_process() is not None:
            util.Finalize(None, self.close_everything, exitpriority=-100)
            self._known_pid = entry.pid

    def discard(self, entry: Entry) -> None:
        """Remove an entry, unless a newer one has taken its place."""
        if self._entries.get(entry.key) is entry:
            self._entries.pop(entry.key, None)

    def open_entries(self) -> list[Entry]:
        """Return the open entries, newest first."""
        return list(self._entries.copy().values())[::-1]

    def exit_left_s(self) -> float:
        """Return how long the exit callback may still wait for other threads, in seconds."""
        return max(0.0, self.exit_ends - monotonic())

    def skip_at_exit(self, thread: int) -> None:
        """Exclude the entries that a hanging thread is closing from the exit callback."""
        for entry in self.open_entries():
            if entry.thread == thread:
                entry.at_exit = False

    def close_everything(self) -> None:
        """Close all entries of this process, newest first, and then those opened meanwhile.

        From here on `is_shutting_down` is True. Each entry is tried once. Any exception goes to
        `sys.unraisablehook` and skips no entry. An entry whose owner is being collected in another
        thread is left to the owner's destructor.
        """
        Phase.exiting = True
        pid, me = getpid(), get_ident()
        tried: set[Entry] = set()
        self.exit_ends = monotonic() + EXIT_WAIT_S
        waits = False
        with DeferredSignals():
            for _ in range(MOST_PASSES):
                mine = [e for e in self.open_entries() if e.pid == pid and e.at_exit]
                batch = [entry for entry in mine if entry not in tried]
                if not batch:
                    break
                tried.update(batch)
                for entry in batch:
                    try:
                        entry.close(timeout_s=max(0.001, self.exit_left_s()))
                    except BaseException as error:
                        # A SystemExit or KeyboardInterrupt must not skip the other entries, and
                        # the program is ending already.
                        _report_unraisable(error, f"{entry.name}._release")
                    waits |= entry.thread not in (None, me)
            # A thread that was closing a resource may go on with others of the same collection.
            while waits and self.exit_left_s() and any(self.get(e.key) is e for e in tried):
                sleep(0.005)


REGISTRY = Registry()


@early_bound
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
        kept: The owner, if a scope keeps it until it is closed.
    """

    def __init__(
        self,
        key: int,
        name: str,
        owner: Callable[[], Any],
        release: Callable[[Any], Any],
        at_exit: bool = True,
    ) -> None:
        self.key, self.name = key, name
        self.owner, self.release = owner, release
        self.at_exit = at_exit
        self.pid = getpid()
        self.thread: int | None = None
        self.raised: int | None = None
        self.kept: Any = None
        self._is_finished = False
        self._claim = allocate_lock()

    def is_closed(self) -> bool:
        """Return whether it is closed. The thread that is closing it still sees it open."""
        return self._is_finished or (self._claim.locked() and self.thread != get_ident())

    def close(self, owner: Any = None, timeout_s: float = -1) -> bool:
        """Release the owner once; wait if another thread is releasing it.

        Args:
            owner: The owner, for callers whose weak reference to it is dead.
            timeout_s: How long to wait in seconds; forever if negative. The release itself does
                not wait. A thread that is itself releasing waits at most `NESTED_WAIT_S`.

        Returns:
            True if this call ran the release.

        Raises:
            BaseException: The release raised it. The entry is closed nevertheless.
        """
        if self.pid != getpid():
            REGISTRY.discard(self)  # In a forked child: the resource belongs to the parent.
            return False
        subject = self.owner() if owner is None else owner
        if subject is not None:  # Otherwise its destructor is about to close it.
            with DeferredSignals():
                if self._claim.acquire(blocking=False):
                    try:
                        if self._is_finished:
                            return False
                        self.thread = get_ident()
                        try:
                            ensure_ran(self.release(subject))
                        finally:
                            self._is_finished = True
                            self.kept = None
                            REGISTRY.discard(self)
                        return True
                    except BaseException as error:
                        self.raised = id(error)
                        raise
                    finally:
                        self._claim.release()
        if self.thread != get_ident() and timeout_s != 0:
            self._wait(timeout_s)
        return False

    def _wait(self, timeout_s: float) -> None:
        """Wait until the thread that claimed it has finished."""
        me = get_ident()
        if any(e.thread == me and e._claim.locked() for e in REGISTRY.open_entries()):
            timeout_s = NESTED_WAIT_S if timeout_s < 0 else min(timeout_s, NESTED_WAIT_S)
        if self._claim.acquire(timeout=timeout_s):
            self._claim.release()
        else:
            log(ERROR, "another thread is still closing %s; not waiting any longer", self.name)


atexit.register(REGISTRY.close_everything)
