"""A file of which every block is compared with its checksum before something in it is used.

Checking a gigabyte takes longer than opening should, so a block is checked when something in it
is first needed: a search needs all vectors, but few texts.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rag_demo.errors import damaged

__all__ = ["BLOCK_BYTES", "CheckedFile", "ReadFile", "open_regular", "read_at"]

BLOCK_BYTES = 1 << 20
_FEW_BYTES = 1 << 16
_MANY_BLOCKS = 8  # and how many a thread takes at once


class CheckedFile(ABC):
    """A file of known size and checksums. Threads may share it.

    Attributes:
        path: Where it is.

    Args:
        path: Where it is.
        nbytes: How many bytes it has to have.
        expected: The CRC-32 of each `BLOCK_BYTES` bytes: shape (blocks,), uint32.

    Raises:
        IndexFileError: It is missing, no regular file, or of another size.
    """

    def __init__(self, path: Path, nbytes: int, expected: npt.NDArray[np.uint32]) -> None:
        self.path = path
        self._nbytes = nbytes
        self._expected = expected
        self._checked = np.zeros(len(expected), bool)
        self._lock = threading.Lock()
        if len(expected) != -(-nbytes // BLOCK_BYTES):
            raise damaged(path, "its checksums are not all there")
        try:
            with open_regular(path) as descriptor:
                size = os.fstat(descriptor).st_size
                if size != nbytes:
                    raise damaged(path, f"it has {size} bytes, not {nbytes}")
                self._take(descriptor)
        except OSError as error:
            raise damaged(path, error) from None

    def __len__(self) -> int:
        return self._nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes, after a check of the blocks that they are in.

        Raises:
            IndexFileError: A block is not what was written, or the file was cut off meanwhile.
        """
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        if not self._checked[first:last].all():
            self._check_blocks(range(first, last))
        return self._bytes(start, stop)

    def check(self, starts: npt.NDArray[np.int64], nbytes: int) -> None:
        """Check the blocks that some stretches are in, of which each has ``nbytes`` bytes.

        Raises:
            IndexFileError: See `read`.
        """
        wanted = np.zeros(len(self._expected), bool)
        for offset in (*range(0, nbytes, BLOCK_BYTES), nbytes - 1):
            wanted[(starts + offset) // BLOCK_BYTES] = True
        self._check_blocks(np.flatnonzero(wanted & ~self._checked).tolist())

    def check_all(self) -> None:
        """Check every block."""
        self._check_blocks(np.flatnonzero(~self._checked).tolist())

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        """Check blocks; many on two threads, since computing a CRC leaves the interpreter free."""
        if len(blocks) < _MANY_BLOCKS:
            self._check_each(blocks)
        else:
            firsts = range(0, len(blocks), _MANY_BLOCKS)
            parts = [blocks[first : first + _MANY_BLOCKS] for first in firsts]
            with self._lock, ThreadPoolExecutor(2) as executor:
                list(executor.map(self._check_each, parts))

    def _check_each(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._check(block)

    def _check(self, block: int) -> None:
        if self._checked[block]:
            return
        start = block * BLOCK_BYTES
        content = self._bytes(start, min(start + BLOCK_BYTES, self._nbytes))
        if zlib.crc32(content) != self._expected[block]:
            raise damaged(self.path, f"the checksum of its bytes from {start} on is wrong")
        self._checked[block] = True

    @abstractmethod
    def _take(self, descriptor: int) -> None:
        """Take the open file; the descriptor is closed afterwards."""

    @abstractmethod
    def _bytes(self, start: int, stop: int) -> memoryview:
        """Return bytes as they are."""


class ReadFile(CheckedFile):
    """One that is read as needed: what cuts it off is an error, and not the end of the process."""

    def _take(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        # Not at exit: a daemon thread may still read.
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def _bytes(self, start: int, stop: int) -> memoryview:
        # Of blocks in pages of their own nothing stays behind in the allocator.
        content = bytearray(stop - start) if stop - start < _FEW_BYTES else mmap(-1, stop - start)
        try:
            read_at(self._descriptor, content, start)
        except OSError as error:
            raise damaged(self.path, error) from None
        return memoryview(content)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a file for reading, and close it; yields its descriptor.

    Raises:
        OSError: It is missing; or a pipe, a device, a socket or a folder, which would block, or
            do something when it is opened.
    """
    # Asked before it is opened, and of what was opened: it may be replaced in between.
    _refuse_irregular(path.stat(), path)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        _refuse_irregular(os.fstat(descriptor), path)
        yield descriptor
    finally:
        os.close(descriptor)


def read_at(descriptor: int, content: bytearray | mmap, start: int = 0) -> None:
    """Fill ``content`` from a file, beginning at a byte of it.

    Raises:
        OSError: The file ends before.
    """
    view, done = memoryview(content), 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], start + done)
        if not count:
            raise OSError(f"it was cut off at byte {start + done}")
        done += count


def _refuse_irregular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path.name} is no regular file")
