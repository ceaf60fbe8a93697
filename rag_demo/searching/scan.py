"""Rounded copies of vectors, which are fewer bytes to read, and how far they are from the truth.

Blocks of rows share a scale, and an error that is proven: no row of the block is further than
that from its copy. So a search knows which rows cannot be among the best from their copies alone:
see `rag_demo.searching.candidates`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from rag_demo.documents.growing import Growing

__all__ = ["BLOCK", "Scan", "ScannedCopy", "make_scan", "round_rows", "slices"]

Array = npt.NDArray[Any]

BLOCK = 32  # rows that share a scale and a bound
_ROUNDED_ROWS = 1 << 12  # at once: what they take stays in the processor's cache
_FLOAT_ERRORS = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Scan:
    """The rounded copies of n vectors of length 1, in blocks of `BLOCK` rows.

    Attributes:
        vectors: Shape (n, d): int8, or a float type of torch, on its device.
        scales: Shape (blocks,), float32: a value of ``vectors`` times this is the true value,
            rounded.
        errors: Shape (blocks,), float32: no row of a block is further than this from its
            rounded copy, by Euclidean distance.
        start: The number of the first row.
    """

    vectors: Any
    scales: Any
    errors: Any
    start: int = 0

    def __len__(self) -> int:
        return int(self.vectors.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def tensors(self) -> tuple[Any, Any, Any]:
        """All of it."""
        return self.vectors, self.scales, self.errors

    @classmethod
    def of_floats(cls, vectors: Any, start: int = 0) -> Scan:
        """Make one of a tensor of a float type as it is, on its device."""
        import torch

        name = str(vectors.dtype).removeprefix("torch.")
        error = _FLOAT_ERRORS[name] + (2.0**-20 if name == "float16" else 0.0)  # its subnormals
        blocks = -(-len(vectors) // BLOCK)
        return cls(
            vectors,
            torch.ones(blocks, device=vectors.device),
            torch.full((blocks,), error, device=vectors.device),
            start,
        )

    def unscaled(self, values: Any, rows: Any) -> Any:
        """Turn values of these rows (all, if None) into what they stand for."""
        scales = self.scales.repeat_interleave(BLOCK)[: len(self)]
        return values * (scales if rows is None else scales[rows])[:, None]

    def batches(self, step: int) -> Iterator[tuple[int, Any]]:
        """Yield the vectors, ``step`` rows at a time, with the position of the first."""
        for position in range(0, len(self), step):
            yield position, self.vectors[position : position + step]


def make_scan(vectors: Array, kind: str, device: str) -> Scan:
    """Round vectors: to "int8", "float16" or "bfloat16", or not at all ("float32")."""
    import torch

    source = torch.from_numpy(vectors)
    if kind != "int8":
        return Scan.of_floats(source.to(device=device, dtype=getattr(torch, kind)))
    blocks = -(-len(vectors) // BLOCK)
    rounded = torch.empty(source.shape, dtype=torch.int8)
    scales, errors = torch.empty(blocks), torch.empty(blocks)
    for rows in slices(0, len(vectors), _ROUNDED_ROWS):
        its = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        rounded[rows], scales[its], errors[its] = round_rows(source[rows], BLOCK)
    return Scan(rounded.to(device), scales.to(device), errors.to(device))


def round_rows(vectors: Any, block: int, most: int = 127) -> tuple[Any, Any, Any]:
    """Round rows to int8 with one scale for each block; say how far off the worst row is.

    Args:
        vectors: Shape (n, d).
        block: Rows that share a scale.
        most: The largest of the rounded numbers.
    """
    import torch

    count = len(vectors)
    padded = torch.nn.functional.pad(vectors, (0, 0, 0, -count % block)).view(
        -1, block, vectors.shape[1]
    )
    scales = padded.abs().amax(dim=(1, 2)).clamp_min(1e-30) / most
    values = (padded / scales[:, None, None]).round_().clamp_(-most, most)
    # Rounded up, for the result rests on it: float32 errs by far less than what is added.
    distances = (padded - values * scales[:, None, None]).norm(dim=2)
    errors = distances.amax(dim=1) * (1 + 1e-4) + 1e-6
    return values.to(torch.int8).view(-1, vectors.shape[1])[:count], scales, errors


class ScannedCopy:
    """An int8 copy of the first rows of vectors, in whole blocks, that grows with them.

    A snapshot; see `Growing`.
    """

    def __init__(self, vectors: Any, scales: Any, errors: Any) -> None:
        self._parts = (Growing(vectors), Growing(scales), Growing(errors))

    def __len__(self) -> int:
        return len(self._parts[0])

    @classmethod
    def of(cls, vectors: Array) -> ScannedCopy:
        """Round vectors, but for the last ones that fill no block."""
        return cls(*make_scan(vectors[: len(vectors) // BLOCK * BLOCK], "int8", "cpu").tensors)

    @property
    def scan(self) -> Scan:
        """It, to be searched."""
        return Scan(*(part.rows for part in self._parts))

    def extended(self, vectors: Array) -> ScannedCopy:
        """Return one with the copies of more vectors, whole blocks of them, behind these."""
        new = make_scan(vectors, "int8", "cpu").tensors
        bigger = ScannedCopy.__new__(ScannedCopy)
        first, second, third = (
            part.append(rows) for part, rows in zip(self._parts, new, strict=True)
        )
        bigger._parts = (first, second, third)
        return bigger


def slices(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield slices that cover the rows from ``start`` to ``stop``."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
