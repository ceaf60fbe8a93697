"""Vectors in a file, which pass through two buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rag_demo.vectors import Vectors


def stream(
    step: int,
    shape: tuple[int, int],
    device: str,
    is_pinned: bool,
    read_into: Callable[[int, Vectors], object],
) -> Iterator[Any]:
    """Yield vectors of a file as tensors, and read the next ones meanwhile.

    Args:
        step: How many rows each of the two buffers has.
        shape: The shape of all vectors: (n, d).
        device: The device that searches them.
        is_pinned: Whether the buffers are pinned, so that the device copies them by itself.
        read_into: Reads the vectors from a row on into an array: shape (m, d), float32.
    """
    count, dimension = shape
    buffers = [torch.empty(step, dimension, pin_memory=is_pinned) for _ in range(2)]
    copied: list[Any] = [None, None]  # events: a buffer was copied to the device

    def read(start: int) -> Any:
        number = start // step % 2
        if copied[number] is not None:
            copied[number].synchronize()
        buffer = buffers[number][: count - start]
        read_into(start, buffer.numpy())
        return buffer

    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(read, 0)
        for start in range(0, count, step):
            vectors = coming.result().to(device, non_blocking=is_pinned)
            if is_pinned:
                stream = torch.cuda.current_stream(vectors.device)
                copied[start // step % 2] = stream.record_event()
            if start + step < count:  # The caller has finished with the other buffer.
                coming = reader.submit(read, start + step)
            yield vectors
