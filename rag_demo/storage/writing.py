"""Writing a folder's files: one writer at a time, and nothing said before it is on the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rag_demo.errors import IndexFileError

__all__ = ["LOCK", "lock", "sync"]

LOCK = "lock"


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Be the only one that writes into a folder, among all processes and threads.

    The system lets go of it when the process ends, however it does.

    Raises:
        IndexFileError: Another one is writing.
    """
    try:
        import fcntl
    except ImportError:  # Windows: the rename is atomic there too, but writers are not kept apart.
        yield
        return
    path = folder / LOCK
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise IndexFileError(
                f"{folder} is being written by another process ({file.read(20) or 'unknown'}); "
                "wait until it has ended, or name another folder"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
