"""A scan of vectors that stay where they are, on a disk, and pass through two buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rag_demo.searching.scan import BLOCK, Scan
from rag_demo.vectors import Vectors

_COPIED_ROWS = 1024  # between two moments when the file's pages are let go

__all__ = ["StreamedScan", "make_streamed_scan", "wait_for_device"]


@dataclass(frozen=True)
class StreamedScan(Scan):
    """As `Scan`, with ``vectors`` an empty tensor that says the type and the device.

    Attributes:
        source: Shape (n, d), float32, mapped.
        buffer_rows: How many rows each of the two buffers holds.
        passed: Called with the first row and the count of those that were copied.
    """

    source: Vectors = None  # type: ignore[assignment]  # always given; the base class has defaults
    buffer_rows: int = 0
    passed: Callable[[int, int], object] = lambda start, count: None

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, step: int) -> Iterator[tuple[int, Any]]:
        """Yield the vectors; while one batch is computed with, the next one is read."""
        import torch

        step = max(BLOCK, min(step, self.buffer_rows) // BLOCK * BLOCK)
        device = self.vectors.device
        shape = (min(step, len(self)), self.source.shape[1])
        buffers = [torch.empty(shape, pin_memory=device.type == "cuda") for _ in range(2)]

        def read(number: int) -> Any:
            start = number * step
            buffer = buffers[number % 2][: len(self) - start]
            values = buffer.numpy()
            for first in range(0, len(values), _COPIED_ROWS):
                some = values[first : first + _COPIED_ROWS]
                some[:] = self.source[start + first : start + first + len(some)]
                self.passed(start + first, len(some))
            return buffer

        count = -(-len(self) // step)
        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(read, 0)
            for number in range(count):
                batch = coming.result()
                # Into the buffer of the batch before: that was copied, or computed with.
                if number + 1 < count:
                    coming = reader.submit(read, number + 1)
                if device.type != "cpu":
                    batch = batch.to(device, non_blocking=True)
                    # The buffer is filled again two batches later, and must have been copied.
                    wait_for_device(device)
                yield number * step, batch


def wait_for_device(device: Any) -> None:
    """Wait until what was asked of a device is done; of CUDA, what its current stream was asked."""
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    else:
        getattr(torch, device.type).synchronize()  # mps, xpu


def make_streamed_scan(
    source: Vectors, device: str, budget_bytes: int, passed: Callable[[int, int], object]
) -> StreamedScan:
    """Make a scan that takes a quarter of ``budget_bytes`` for its two buffers.

    The rest is for the scores, for the vectors that are scored exactly, and for pages of the
    file that are on their way.

    Raises:
        ValueError: The budget is too small for a block of vectors.
    """
    import torch

    row_bytes = 4 * source.shape[1]
    rows = budget_bytes // 8 // row_bytes
    if rows < BLOCK:
        least = 8 * BLOCK * row_bytes
        raise ValueError(f"memory_budget must be at least {least} bytes for these vectors")
    blocks = -(-len(source) // BLOCK)
    empty = torch.empty(0, source.shape[1], device=device)
    scales, errors = torch.ones(blocks, device=device), torch.zeros(blocks, device=device)
    return StreamedScan(empty, scales, errors, 0, source, rows, passed)
