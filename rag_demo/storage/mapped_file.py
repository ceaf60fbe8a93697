"""A file in memory: mapped, or copied if it is small."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import numpy.typing as npt

from rag_demo.errors import damaged
from rag_demo.storage.checked_file import BLOCK_BYTES, CheckedFile, read_at

__all__ = ["MappedFile"]

# What is mapped ends the process by SIGBUS when somebody cuts the file off, and no handler in
# Python can prevent that; a copy is safe. Copying this much takes 5 ms.
COPIED_BYTES = 1 << 24
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14; the module mmap does not name it yet


class MappedFile(CheckedFile):
    """A checked file as one stretch of memory.

    Up to `COPIED_BYTES` it is copied; what is larger is mapped, and must not be cut off while it
    is open. Replacing or removing it does no harm.

    Attributes:
        unchecked: The bytes, for who sees to the checks: `check_all`. Never write to them.
        resident: Whether what was checked may stay in memory.
    """

    resident = True

    def _take(self, descriptor: int) -> None:
        self._map: mmap.mmap | None = None
        self.unchecked: mmap.mmap | bytes = b""
        if len(self) > COPIED_BYTES:
            # Private, so that torch may have it; what is written there never gets into the file.
            self.unchecked = self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        elif len(self):
            self.unchecked = mmap.mmap(-1, len(self))  # Memory that all goes back when it is freed.
            read_at(descriptor, self.unchecked)
        self._view = memoryview(self.unchecked)

    def array(self, dtype: str, shape: tuple[int, ...], start: int) -> npt.NDArray[np.generic]:
        """Return part of it as an array, unchecked."""
        count = int(np.prod(shape, dtype=np.int64))
        if not count:
            return np.empty(shape, dtype)
        return np.frombuffer(self.unchecked, dtype, count, start).reshape(shape)

    def drop(self, start: int = 0, nbytes: int | None = None) -> None:
        """Let go of resident pages; they are read again when they are needed."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            stop = len(self) if nbytes is None else min(start + nbytes, len(self))
            if stop > first:
                self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def check_length(self) -> None:
        """Raise an IndexFileError if the file was cut off since it was opened.

        Takes a microsecond. Who asks before using what is mapped is safe from all but a cut in
        that very moment.
        """
        if self._map is not None and self._map.size() < len(self):
            raise damaged(self.path, f"it was cut off to {self._map.size()} bytes")

    def _bytes(self, start: int, stop: int) -> memoryview:
        return self._view[start:stop]

    def _check(self, block: int) -> None:
        if self._checked[block]:
            return
        self.check_length()
        self._populate(block * BLOCK_BYTES)
        super()._check(block)
        if not self.resident:
            self.drop(block * BLOCK_BYTES, BLOCK_BYTES)

    def _populate(self, start: int) -> None:
        """Map a block's pages at once; one by one takes seven times as long as the checksum."""
        if self._map is not None and sys.platform == "linux":
            try:
                self._map.madvise(_POPULATE_READ, start, min(BLOCK_BYTES, len(self) - start))
            except OSError:
                pass  # An older kernel maps them as they are touched.
