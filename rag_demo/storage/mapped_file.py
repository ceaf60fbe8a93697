"""The files of a saved index: mapped into memory, and every block checked before it is used.

Checking a file of a gigabyte takes longer than opening it should, so a block's checksum is
compared when something in it is first needed: a search needs all vectors, but few texts.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Record, parse_record
from rag_demo.errors import IndexFileError

__all__ = ["BLOCK_BYTES", "MappedFile", "TextFile", "checksums", "damaged", "lock", "sync"]

BLOCK_BYTES = 1 << 20
AGAIN = "make it again with: rag-demo index SOURCE --out"
LOCK = "lock"


class MappedFile:
    """A file of known size and checksums, mapped read-only. Threads may share it.

    Attributes:
        path: Where it is.
        unchecked: The bytes, for who sees to the checks: `check_all`.
        resident: Whether what was checked may stay in memory.

    Args:
        path: Where it is.
        nbytes: How many bytes it has to have.
        expected: The CRC-32 of each `BLOCK_BYTES` bytes: shape (blocks,), uint32.

    Raises:
        IndexFileError: It is missing, or of another size.
    """

    def __init__(self, path: Path, nbytes: int, expected: npt.NDArray[np.uint32]) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != nbytes:
                    raise damaged(path, f"it has {size} bytes, not {nbytes}")
                # Private, so that torch may have it; nobody writes. An empty file cannot be mapped.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
        except OSError as error:
            raise damaged(path, str(error)) from None
        if len(expected) != -(-nbytes // BLOCK_BYTES):
            raise damaged(path, "its checksums are not all there")
        self._view = memoryview(self._map)
        self.unchecked = self._map
        self.resident = True
        self._expected = expected
        self._checked = np.zeros(len(expected), bool)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._view)

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes, after a check of the blocks that they are in.

        Raises:
            IndexFileError: A block is not what was written.
        """
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            self._check(block)
        return self._view[start:stop]

    def drop(self, start: int = 0, nbytes: int | None = None) -> None:
        """Let go of resident pages; they are read again when they are needed."""
        if isinstance(self._map, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            stop = len(self._map) if nbytes is None else min(start + nbytes, len(self._map))
            if stop > first:
                self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def check_all(self) -> None:
        """Check every block, on two threads: computing a CRC leaves the interpreter free."""
        if self._checked.all():
            return
        with self._lock, ThreadPoolExecutor(2) as executor:
            list(executor.map(self._check, range(len(self._expected))))

    def _check(self, block: int) -> None:
        if self._checked[block]:
            return
        start = block * BLOCK_BYTES
        if zlib.crc32(self._view[start : start + BLOCK_BYTES]) != self._expected[block]:
            raise damaged(self.path, f"the checksum of its bytes from {start} on is wrong")
        if not self.resident:
            self.drop(start, BLOCK_BYTES)
        self._checked[block] = True


class TextFile:
    """The records of an index, one to a line; a `RecordSource`.

    Args:
        file: The lines.
        offsets: Where each begins, and where the last one ends: shape (n + 1,), uint64.

    Raises:
        IndexFileError: The offsets are none.
    """

    def __init__(self, file: MappedFile, offsets: npt.NDArray[np.uint64]) -> None:
        self._file = file
        file.resident = False  # Of a block that was checked one line is needed.
        self._offsets = offsets.astype(np.int64)
        ordered = bool((np.diff(self._offsets) > 0).all())
        if not (len(offsets) and ordered and self._offsets[0] == 0):
            raise damaged(file.path, "its lines are not where they should be")
        if self._offsets[-1] != len(file):
            raise damaged(file.path, "its last line is not where it should be")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def check_all(self) -> None:
        """Check every block of the file."""
        self._file.check_all()

    def read(self, row: int) -> Record:
        """Read one record."""
        line = self._file.read(int(self._offsets[row]), int(self._offsets[row + 1]))
        try:
            return parse_record(bytes(line))
        except ValueError as error:
            raise damaged(self._file.path, str(error)) from None


def checksums(path: Path) -> npt.NDArray[np.uint32]:
    """Compute the CRC-32 of each block of a file."""
    with path.open("rb") as file:
        found = [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]
    return np.asarray(found, np.uint32)


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


def damaged(path: Path, reason: Any) -> IndexFileError:
    """Make the error for a file that is not what was written."""
    return IndexFileError(f"{path} is damaged ({reason}); {AGAIN} {path.parent}")
