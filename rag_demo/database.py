"""One SQLite connection, shared by threads and opened again in a forked child."""

from __future__ import annotations

import contextlib
import mmap
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rag_demo.errors import RagDemoError

_INHERITED: list[sqlite3.Connection] = []  # in a forked child: never used and never closed

FORK_AWARE: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects with a method `leave_to_parent`, which is called in a forked child."""


def _after_fork() -> None:
    for each in list(FORK_AWARE):
        each.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Database:
    """A connection that threads take turns to use. It is opened on first use.

    SQLite forbids closing a parent's connection in a forked child. The child opens its own instead.
    Do not fork while another thread uses this.

    Args:
        connect: Opens the connection.
        is_temporary: Whether the database has no name; a forked child then copies it on first use,
            if the parent has not called `will_write` since the fork.
        translate_errors: A context manager that turns SQLite's errors into others.
    """

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        *,
        is_temporary: bool = False,
        translate_errors: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._connect = connect
        self._inherited: sqlite3.Connection | None = None
        # How often this process has written, also in memory that its forked children share.
        self._count = 0
        self._writes = mmap.mmap(-1, 8) if is_temporary else None
        self._translate_errors = translate_errors
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        FORK_AWARE.add(self)

    @contextlib.contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection; other threads wait until the block ends."""
        with self._lock, self._translate_errors():
            if self._connection is None:
                self._connection = self._connect()
                # A C function: an interrupt inside a Python finalizer would be lost.
                self._finalizer = weakref.finalize(self, self._connection.close)
                self._finalizer.atexit = False
                if self._inherited is not None:
                    self._copy_inherited(self._connection)
            yield self._connection

    def will_write(self) -> None:
        """Announce a write, so that no forked child reads what is being changed."""
        if self._writes is not None:
            self._count += 1
            self._writes[:] = self._count.to_bytes(8, "little")

    def _copy_inherited(self, connection: sqlite3.Connection) -> None:
        assert self._inherited is not None and self._writes is not None
        self._inherited.backup(connection)
        if int.from_bytes(self._writes[:], "little") != self._count:
            self.close()
            raise RagDemoError(
                "the parent process has changed documents that were not saved before the fork; "
                "save them before the fork, and load the index in the child"
            )
        self._inherited = None
        self._count, self._writes = 0, mmap.mmap(-1, 8)

    def close(self) -> None:
        """Close the connection; `use` opens it again."""
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._connection = None

    def leave_to_parent(self) -> None:
        """In a forked child, forget the connection of the parent process."""
        self._lock = threading.RLock()
        if self._finalizer is not None and self._connection is not None:
            _INHERITED.append(self._connection)
            if self._writes is not None:
                self._inherited = self._connection
            self._finalizer.detach()
            self._connection = self._finalizer = None
