"""Growing: rows that are appended to, while who has them goes on seeing what they saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Growing"]

_ROOM = 64  # rows at least, whenever a larger buffer is made


class Growing:
    """A snapshot of the first rows of a buffer, which never change.

    `append` writes behind them, where nobody looks, and returns another snapshot: an append that
    is interrupted, or whose result is dropped, has changed nothing. Only the newest snapshot
    that is in use may be appended to: what was appended to the same one before is overwritten.

    Args:
        buffer: An array of numpy, or a tensor, whose rows are the first ones.
        count: How many; all, if None.
    """

    __slots__ = ("_buffer", "_count")

    def __init__(self, buffer: Any, count: int | None = None) -> None:
        self._buffer = buffer
        self._count = len(buffer) if count is None else count

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Any:
        """The rows, as a view."""
        return self._buffer[: self._count]

    def append(self, rows: Sequence[Any] | Any) -> Growing:
        """Put rows behind these; amortised, that costs what they take."""
        count = self._count + len(rows)
        buffer = self._buffer
        if count > len(buffer):
            shape = (count + count // 4 + _ROOM, *buffer.shape[1:])
            if isinstance(buffer, np.ndarray):
                buffer = np.empty(shape, buffer.dtype)
            else:
                buffer = buffer.new_empty(shape)
            buffer[: self._count] = self.rows
        buffer[self._count : count] = rows
        return Growing(buffer, count)
