"""Round vectors to int8, and bound the rounding errors."""

from __future__ import annotations

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
