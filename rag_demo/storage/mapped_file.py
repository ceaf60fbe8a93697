"""A file that is mapped into memory, of which every block is checked before it is used.

Checking a file of a gigabyte takes longer than opening it should, so a block's checksum is
compared when something in it is first needed: a search needs all vectors, but few texts.
"""

from __future__ import annotations

import mmap
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_demo.errors import damaged

__all__ = ["BLOCK_BYTES", "MappedFile", "checksums"]

BLOCK_BYTES = 1 << 20


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


def checksums(path: Path) -> npt.NDArray[np.uint32]:
    """Compute the CRC-32 of each block of a file."""
    with path.open("rb") as file:
        found = [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK_BYTES), b"")]
    return np.asarray(found, np.uint32)
