"""Writing a folder's files: one writer at a time, and nothing said before it is on the disk."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rag_demo.errors import IndexFileError, unwritable
from rag_demo.storage.checked_file import BLOCK_BYTES

__all__ = ["LOCK", "BlockWriter", "lock", "made_and_locked", "sync"]

LOCK = "lock"
# At once: a system that caches what is written in pages as large as the writes maps them as a
# whole later, where a search streams an index and needs a few rows of it.
_PART_BYTES = 1 << 16


class BlockWriter:
    """A new file, and the checksums of what was meant to be in it. A context manager.

    Every file of an index is made here, so that all have the mode that the umask gives.

    Args:
        path: Of a file that is not there yet; nothing is followed or overwritten.
    """

    def __init__(self, path: Path) -> None:
        self.nbytes = 0
        self._crc = 0
        self._full: list[int] = []
        self._file: IO[bytes] = path.open("xb")

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def write(self, data: Any) -> None:
        """Write bytes, or a contiguous array's."""
        view = memoryview(data)
        if not view.nbytes:
            return
        view = view.cast("B")
        while view:
            part = view[: min(_PART_BYTES, BLOCK_BYTES - self.nbytes % BLOCK_BYTES)]
            self._file.write(part)
            self._crc = zlib.crc32(part, self._crc)
            self.nbytes += len(part)
            if self.nbytes % BLOCK_BYTES == 0:
                self._full.append(self._crc)
                self._crc = 0
            view = view[len(part) :]

    def finish(self) -> npt.NDArray[np.uint32]:
        """Wait until it is on the disk; return the CRC-32 of each block."""
        self._file.flush()
        os.fsync(self._file.fileno())
        last = [self._crc] if self.nbytes % BLOCK_BYTES else []
        return np.asarray([*self._full, *last], np.uint32)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Be the only one that writes into a folder, among all processes and threads.

    The system lets go of it when the process ends, however it does.

    Raises:
        IndexFileError: Another one is writing, or what has the lock's name is something else.
    """
    try:
        import fcntl
    except ImportError:  # Windows: the rename is atomic there too, but writers are not kept apart.
        yield
        return
    path = folder / LOCK
    descriptor = _open_lock(path)
    try:
        holder = os.pread(descriptor, 21, 0).decode("ascii", "replace")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise IndexFileError(
                f"'{folder}' is being written by another process ({holder or 'unknown'}); "
                "wait until it has ended, or name another folder"
            ) from None
        if not os.fstat(descriptor).st_nlink:
            raise IndexFileError(f"'{folder}' was removed by another process; try again")
        try:
            # Not what is somebody else's, and has got here by a hard link.
            if re.fullmatch(r"\d{0,20}", holder):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except OSError as error:
            raise IndexFileError(f"'{path}' cannot be written: {error.strerror}") from error
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def made_and_locked(folder: Path) -> Iterator[None]:
    """Do the same for a folder that is made if need be; where nothing comes into it, it goes again.

    Raises:
        IndexFileError: It cannot be made; or see `lock`.
    """
    try:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    try:
        with lock(folder):
            try:
                yield
            finally:
                # While it is locked: who has opened the lock meanwhile finds it removed.
                with contextlib.suppress(OSError):  # Nobody is kept from anything by it.
                    if missing and [each.name for each in folder.iterdir()] == [LOCK]:
                        (folder / LOCK).unlink()
    finally:
        with contextlib.suppress(OSError):  # There is something in it.
            for each in missing:
                each.rmdir()


def _open_lock(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        raise unwritable(path.parent, error, f"{path.name} cannot be locked: ") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IndexFileError(f"'{path}' is no regular file; remove it")
    return descriptor


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
