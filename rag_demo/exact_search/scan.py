"""Scans: vectors on a device, rounded with proven bounds or not, or streamed from a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.vectors import Vectors

BLOCK = 32
"""How many rows share a scale and a bound."""


def round_to_int8(
    vectors: Vectors, block: int = BLOCK
) -> tuple[npt.NDArray[np.int8], Vectors, Vectors]:
    """Round rows to integers from -127 to 127, with one scale for each block.

    Args:
        vectors: Shape (n, d), float32. The last block may have fewer rows.
        block: How many rows a block has.

    Returns:
        The integers, shape (n, d); the scale of each block, shape (blocks,); and, for each block,
        a bound on the Euclidean distance of a row from its rounded copy, shape (blocks,).
    """
    count, dimension = vectors.shape
    codes = np.empty((count, dimension), np.int8)
    blocks = -(-count // block)
    scales, bounds = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    whole = count // block
    parts: list[tuple[Any, Any, slice]] = [
        (vectors[: whole * block], codes[: whole * block], slice(0, whole))
    ]
    if blocks > whole:
        parts.append((vectors[whole * block :], codes[whole * block :], slice(whole, blocks)))
    for part, part_codes, places in parts:
        shape = (places.stop - places.start, -1, dimension)
        grouped = part.reshape(shape) if len(part) else part[:, None]
        largest = np.maximum(
            grouped.max(axis=(1, 2), initial=1e-30), -grouped.min(axis=(1, 2), initial=0)
        )
        scale = (largest / np.float32(127)).astype(np.float32)
        rounded = np.rint(grouped / scale[:, None, None])
        np.clip(rounded, -127, 127, out=rounded)
        part_codes[:] = rounded.reshape(len(part), dimension)
        rounded *= scale[:, None, None]
        rounded -= grouped
        distances = np.sqrt(np.einsum("bij,bij->bi", rounded, rounded))
        scales[places] = scale
        # The bound must hold, so it is rounded up by more than float32 can err.
        bounds[places] = distances.max(axis=1, initial=0) * (1 + 1e-4) + 1e-6
    return codes, scales, bounds


# The largest relative rounding error of each type; float16 also has subnormals.
_FLOAT_ERRORS = {"float32": 0.0, "float16": 2.0**-11 + 2.0**-20, "bfloat16": 2.0**-8}


@dataclass
class Scan:
    """Copies of n vectors of length 1, in blocks of `BLOCK` rows.

    Attributes:
        vectors: Shape (n, d): int8 or a float type, on a device.
        scales: Shape (blocks,), float32: a copy times its scale approximates the true vector.
        bounds: Shape (blocks,), float32: the largest Euclidean distance of a row of the block
            from its copy.
        start: The number of the first row.
    """

    vectors: Any
    scales: Any
    bounds: Any
    start: int = 0

    def __len__(self) -> int:
        return int(self.vectors.shape[0])

    @property
    def tensors(self) -> tuple[Any, Any, Any]:
        """All tensors."""
        return self.vectors, self.scales, self.bounds

    @classmethod
    def of_floats(cls, vectors: Any, start: int = 0) -> Scan:
        """Make a scan of a float tensor, without a copy."""
        import torch

        device, blocks = vectors.device, -(-len(vectors) // BLOCK)
        error = _FLOAT_ERRORS[str(vectors.dtype).removeprefix("torch.")]
        ones = torch.ones(blocks, device=device)
        return cls(vectors, ones, torch.full((blocks,), error, device=device), start)

    def batches(self, step: int) -> Iterator[tuple[int, Any]]:
        """Yield the vectors, ``step`` rows at a time, with the position of the first row."""
        for position in range(0, len(self), step):
            yield position, self.vectors[position : position + step]


def make_scan(vectors: Vectors, kind: str, device: str) -> Scan:
    """Copy vectors to a device as "int8", "float16", "bfloat16" or "float32"."""
    import torch

    if kind == "int8":
        parts: list[Any] = [torch.from_numpy(each).to(device) for each in round_to_int8(vectors)]
        return Scan(*parts)
    return Scan.of_floats(torch.from_numpy(vectors).to(device=device, dtype=getattr(torch, kind)))


class StreamedScan(Scan):
    """Vectors in a file, which pass through two buffers.

    Args:
        shape: The shape of the vectors: (n, d).
        device: The device that searches them.
        budget_bytes: The memory budget; the buffers take a quarter of it.
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
        empty = torch.empty(0, dimension, device=device)  # It only carries type and device.
        ones, zeros = torch.ones(blocks, device=device), torch.zeros(blocks, device=device)
        super().__init__(empty, ones, zeros)
        self._count, self._rows, self._read_into = count, buffer_rows, read_into

    def __len__(self) -> int:
        return self._count

    def batches(self, step: int) -> Iterator[tuple[int, Any]]:
        """Yield the vectors. The next batch is read while the caller works on one."""
        import torch

        step = min(step, self._rows)
        device = self.vectors.device
        shape = (min(step, len(self)), self.vectors.shape[1])
        buffers = [torch.empty(shape, pin_memory=device.type == "cuda") for _ in range(2)]

        def read(number: int) -> Any:
            buffer = buffers[number % 2][: len(self) - number * step]
            self._read_into(number * step, buffer.numpy())
            return buffer

        count = -(-len(self) // step)
        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(read, 0)
            for number in range(count):
                batch = coming.result()
                # The caller has finished with the previous batch, so its buffer is free.
                if number + 1 < count:
                    coming = reader.submit(read, number + 1)
                if device.type != "cpu":
                    batch = batch.to(device, non_blocking=True)
                    wait_for_device(device)  # The buffer is reused two batches later.
                yield number * step, batch


def wait_for_device(device: Any) -> None:
    """Wait until a device has finished; on CUDA, until its current stream has."""
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    else:
        getattr(torch, device.type).synchronize()  # mps, xpu
