"""Vectors rounded to int8, and how far the rounded ones are from the true ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.vectors import Vectors

__all__ = ["BLOCK", "round_to_int8"]

BLOCK = 32
"""Rows that share a scale and a bound."""


def round_to_int8(
    vectors: Vectors, block: int = BLOCK
) -> tuple[npt.NDArray[np.int8], Vectors, Vectors]:
    """Round rows to whole numbers from -127 to 127 that are multiples of one scale in each block.

    Args:
        vectors: Shape (n, d), float32. The last block may have fewer rows.
        block: Rows of a block.

    Returns:
        The whole numbers, shape (n, d); the scale of each block, shape (blocks,); and a bound on
        the Euclidean distance of each row of the block from its rounded copy, shape (blocks,).
    """
    count, dimension = vectors.shape
    codes = np.empty((count, dimension), np.int8)
    blocks = -(-count // block)
    scales, errors = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
    whole = count // block
    parts: list[tuple[Any, Any, slice]] = [
        (vectors[: whole * block], codes[: whole * block], slice(0, whole))
    ]
    if blocks > whole:
        parts.append((vectors[whole * block :], codes[whole * block :], slice(whole, blocks)))
    for part, its_codes, its in parts:
        grouped = part.reshape(its.stop - its.start, -1, dimension) if len(part) else part[:, None]
        largest = np.maximum(
            grouped.max(axis=(1, 2), initial=1e-30), -grouped.min(axis=(1, 2), initial=0)
        )
        scale = (largest / np.float32(127)).astype(np.float32)
        rounded = np.rint(grouped / scale[:, None, None])
        np.clip(rounded, -127, 127, out=rounded)
        its_codes[:] = rounded.reshape(len(part), dimension)
        rounded *= scale[:, None, None]
        rounded -= grouped
        distances = np.sqrt(np.einsum("bij,bij->bi", rounded, rounded))
        scales[its] = scale
        # Rounded up, for the result rests on it: float32 errs by far less than what is added.
        errors[its] = distances.max(axis=1, initial=0) * (1 + 1e-4) + 1e-6
    return codes, scales, errors
