"""One SQLite connection, shared by threads and opened again in a forked child."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

_INHERITED: list[sqlite3.Connection] = []


class Database:
    """A connection that threads take turns to use. It is opened on first use.

    SQLite forbids using or closing a parent's connection in a forked child. The child opens its
    own instead, unless the database is in memory. Do not fork while another thread uses this.

    Args:
        connect: Opens the connection.
        in_memory: Whether the database is in memory; a forked child then has a copy.
        translate_errors: A context manager that turns SQLite's errors into others.
    """

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        *,
        in_memory: bool = False,
        translate_errors: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._connect, self._in_memory = connect, in_memory
        self._translate_errors = translate_errors
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        self._close: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection; other threads wait until the block ends."""
        with self._lock, self._translate_errors():
            pid = 0 if self._in_memory else os.getpid()
            if self._connection is None or self._pid != pid:
                self._close()
                self._connection, self._pid = self._connect(), pid
                finalizer = weakref.finalize(self, _close, self._connection, pid)
                finalizer.atexit = False
                self._close = finalizer
            yield self._connection

    def close(self) -> None:
        """Close the connection; `use` opens it again."""
        with self._lock:
            self._close()
            self._connection = None


def _close(connection: sqlite3.Connection, pid: int) -> None:
    if pid in (0, os.getpid()):
        connection.close()
    else:
        _INHERITED.append(connection)  # Garbage collection would close it.
