"""What a search scans: vectors on a device, rounded or not, or passing by from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rag_demo.exact_search.rounding import BLOCK, round_to_int8
from rag_demo.vectors import Vectors

__all__ = ["Scan", "StreamedScan", "make_scan", "wait_for_device"]

# By how much a number of these types may be off, relative to itself; float16's subnormals besides.
_FLOAT_ERRORS = {"float32": 0.0, "float16": 2.0**-11 + 2.0**-20, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Scan:
    """The copies of n vectors of length 1, in blocks of `BLOCK` rows.

    Attributes:
        vectors: Shape (n, d): int8, or a float type of torch, on its device.
        scales: Shape (blocks,), float32: a value of ``vectors`` times this is the true value,
            rounded.
        errors: Shape (blocks,), float32: no row of a block is further than this from its
            copy, by Euclidean distance.
        start: The number of the first row.
    """

    vectors: Any
    scales: Any
    errors: Any
    start: int = 0

    def __len__(self) -> int:
        return int(self.vectors.shape[0])

    @property
    def tensors(self) -> tuple[Any, Any, Any]:
        """All of it."""
        return self.vectors, self.scales, self.errors

    @classmethod
    def of_floats(cls, vectors: Any, start: int = 0) -> Scan:
        """Scan a tensor of a float type as it is, on its device."""
        import torch

        device, blocks = vectors.device, -(-len(vectors) // BLOCK)
        error = _FLOAT_ERRORS[str(vectors.dtype).removeprefix("torch.")]
        ones = torch.ones(blocks, device=device)
        return cls(vectors, ones, torch.full((blocks,), error, device=device), start)

    def unscaled(self, rows: Any) -> Any:
        """Return what rows (a tensor of numbers; None for all) stand for, as float32."""
        chosen = self.vectors if rows is None else self.vectors.index_select(0, rows)
        if chosen.is_floating_point():
            return chosen.float()
        scales = self.scales.repeat_interleave(BLOCK)[: len(self)]
        return chosen.float() * (scales if rows is None else scales[rows])[:, None]

    def batches(self, step: int) -> Iterator[tuple[int, Any]]:
        """Yield the vectors, ``step`` rows at a time, with the position of the first."""
        for position in range(0, len(self), step):
            yield position, self.vectors[position : position + step]


def make_scan(vectors: Vectors, kind: str, device: str) -> Scan:
    """Copy vectors to a device: as "int8", "float16", "bfloat16" or "float32"."""
    import torch

    if kind == "int8":
        codes, scales, errors = (
            torch.from_numpy(each).to(device) for each in round_to_int8(vectors)
        )
        return Scan(codes, scales, errors)
    return Scan.of_floats(torch.from_numpy(vectors).to(device=device, dtype=getattr(torch, kind)))


class StreamedScan(Scan):
    """Vectors that stay in a file, and pass through two buffers.

    Args:
        shape: Of the vectors: (n, d).
        device: Where they are searched.
        budget_bytes: Twice that of which the buffers take a quarter.
        read_into: Reads the vectors from a row on into an array: shape (m, d), float32.

    Raises:
        ValueError: The budget is too small for a block of vectors.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: str,
        budget_bytes: int,
        read_into: Callable[[int, Vectors], object],
    ) -> None:
        import torch

        count, dimension = shape
        buffer_rows = budget_bytes // 8 // (4 * dimension) // BLOCK * BLOCK
        if not buffer_rows:
            least = 8 * BLOCK * 4 * dimension
            raise ValueError(f"memory_budget must be at least {least} bytes for these vectors")
        blocks = -(-count // BLOCK)
        empty = torch.empty(0, dimension, device=device)  # Says the type and the device.
        ones, zeros = torch.ones(blocks, device=device), torch.zeros(blocks, device=device)
        super().__init__(empty, ones, zeros)
        for name, value in (("_count", count), ("_rows", buffer_rows), ("_read_into", read_into)):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        count: int = self._count  # type: ignore[attr-defined]  # set by __init__
        return count

    def batches(self, step: int) -> Iterator[tuple[int, Any]]:
        """Yield the vectors; while one batch is computed with, the next one is read."""
        import torch

        step = min(step, self._rows)  # type: ignore[attr-defined]  # set by __init__
        device = self.vectors.device
        shape = (min(step, len(self)), self.vectors.shape[1])
        buffers = [torch.empty(shape, pin_memory=device.type == "cuda") for _ in range(2)]

        def read(number: int) -> Any:
            buffer = buffers[number % 2][: len(self) - number * step]
            self._read_into(number * step, buffer.numpy())  # type: ignore[attr-defined]
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
