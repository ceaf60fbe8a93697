"""One SQLite connection, shared by threads and opened again in a forked child; its errors."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rag_demo.errors import RagDemoError, UnreadableIndexError, damaged

_INHERITED: list[object] = []  # in a forked child: never used and never closed

# Their method `leave_to_parent` returns what a forked child must not close.
FORK_AWARE: weakref.WeakSet[Any] = weakref.WeakSet()


def _after_fork() -> None:
    _INHERITED.extend([each.leave_to_parent() for each in FORK_AWARE])


os.register_at_fork(after_in_child=_after_fork)


class DamagedRowError(Exception):
    """A row is missing or cannot be read."""


class Database:
    """A connection that threads take turns to use. It is opened on first use.

    SQLite forbids closing a parent's connection in a forked child. The child opens its own instead.
    Do not fork while another thread uses this.

    Args:
        connect: Opens the connection.
        translate_errors: A context manager that turns SQLite's errors into others.

    Attributes:
        is_only_here: Whether there is content that another connection would not see, because the
            database has no name.
    """

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        *,
        translate_errors: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._connect = connect
        self.is_only_here = self._is_lost = False
        self._translate_errors = translate_errors
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        FORK_AWARE.add(self)

    @contextlib.contextmanager
    def use(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection; other threads wait until the block ends."""
        with self._lock, self._translate_errors():
            if self._is_lost:
                raise RagDemoError(
                    "documents that were not saved are not in a forked child; "
                    "save them before the fork, and load the index in the child"
                )
            if self._connection is None:
                self._connection = self._connect()
                # A C function: an interrupt inside a Python finalizer would be lost.
                self._finalizer = weakref.finalize(self, self._connection.close)
                self._finalizer.atexit = False
            yield self._connection

    def close(self) -> None:
        """Close the connection; `use` opens it again."""
        with self._lock:
            if self._finalizer is not None:
                self._finalizer()
            self._connection = None

    def leave_to_parent(self) -> object:
        """In a forked child, forget and return the connection of the parent process."""
        self._lock = threading.RLock()
        self._is_lost = self.is_only_here
        if self._finalizer is not None:
            self._finalizer.detach()
        inherited, self._connection = self._connection, None
        return inherited


@contextlib.contextmanager
def index_errors(path: Path) -> Iterator[None]:
    """Turn errors of the files of an index and damaged rows into this package's."""
    try:
        yield
    except (sqlite3.ProgrammingError, FileNotFoundError):
        raise  # A mistake of this program; or another one has replaced the file.
    except (sqlite3.Error, OSError, DamagedRowError) as error:
        # Such as a lock or a full disk; a text that cannot be decoded is damage.
        is_passing = isinstance(error, (sqlite3.OperationalError, OSError))
        if is_passing and "decode" not in str(error):
            advice = "check its permissions, free some space, and try again"
            if "readonly" in str(error) or getattr(error, "errno", None) == errno.EROFS:
                advice = "it is read-only; name another folder"
            raise UnreadableIndexError(
                f"'{path}' cannot be written or read: {error}; {advice}"
            ) from None
        raise damaged(path, error) from None
