"""Vectors in a file, which pass through two buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rag_demo.vectors import Vectors


class StreamedVectors:
    """Vectors in a file, of which each search reads all.

    Args:
        shape: The shape of the vectors: (n, d).
        device: The device that searches them.
        buffer_bytes: The size of each of the two buffers.
        is_pinned: Whether the buffers are pinned, so that the device copies them by itself.
        read_into: Reads the vectors from a row on into an array: shape (m, d), float32.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: str,
        buffer_bytes: int,
        is_pinned: bool,
        read_into: Callable[[int, Vectors], object],
    ) -> None:
        self._shape, self._device, self._is_pinned = shape, torch.device(device), is_pinned
        self._rows, self._read_into = max(1, buffer_bytes // (4 * shape[1])), read_into

    def chunks(self, step: int) -> Iterator[Any]:
        """Yield the vectors, and read the next ones meanwhile."""
        count, dimension = self._shape
        step = min(step, self._rows, count)
        buffers = [torch.empty(step, dimension, pin_memory=self._is_pinned) for _ in range(2)]
        copied: list[Any] = [None, None]  # events: a buffer was copied to the device

        def read(start: int) -> Any:
            number = start // step % 2
            if copied[number] is not None:
                copied[number].synchronize()
            buffer = buffers[number][: count - start]
            self._read_into(start, buffer.numpy())
            return buffer

        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(read, 0)
            for start in range(0, count, step):
                vectors = coming.result()
                if start + step < count:  # The caller has finished with the other buffer.
                    coming = reader.submit(read, start + step)
                if self._device.type != "cpu":
                    vectors = vectors.to(self._device, non_blocking=self._is_pinned)
                if self._is_pinned:
                    copied[start // step % 2] = event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
                    event.record(torch.cuda.current_stream(self._device))
                yield vectors
