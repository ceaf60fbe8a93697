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
        is_pinned: Whether the buffers are pinned, which a GPU reads faster.
        read_into: Reads the vectors from a row on into an array: shape (m, d), float32.
    """
    count, dimension = shape
    buffers = [torch.empty(step, dimension, pin_memory=is_pinned) for _ in range(2)]

    def read(start: int) -> Any:
        buffer = buffers[start // step % 2][: count - start]
        read_into(start, buffer.numpy())
        return buffer

    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(read, 0)
        for start in range(0, count, step):
            vectors = coming.result().to(device)  # It waits, so the buffer may be filled again.
            if start + step < count:
                coming = reader.submit(read, start + step)
            yield vectors
