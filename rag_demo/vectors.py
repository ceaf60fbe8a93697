"""Vectors: their types, their length, and how far a float32 product of them can err."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Rows", "Vectors", "normalized", "rounding"]

Vectors = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


def rounding(dimension: int) -> float:
    """Bound the difference of two float32 products of vectors of length 1 from exact ones.

    Each errs by at most d * 2**-24 (Higham, Accuracy and Stability of Numerical Algorithms,
    section 3.1), whatever the order of summation.
    """
    return 4 * dimension * 2.0**-24


def normalized(vectors: Any, texts: int | None = None) -> Vectors:
    """Return what a model made as float32 vectors of length 1.

    Args:
        vectors: Shape (n, d).
        texts: How many there have to be; None where they are nobody's.

    Raises:
        ValueError: There are more or fewer, or one is zero or not finite; the message names its
            row.
    """
    array = np.asarray(vectors, np.float32)
    if array.ndim != 2:
        raise ValueError(f"the model's vectors must have the shape (n, d), not {array.shape}")
    if texts is not None and len(array) != texts:
        raise ValueError(f"the model made {len(array)} vectors of {texts} texts")
    lengths = np.linalg.norm(array.astype(np.float64), axis=1)
    bad = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if len(bad):
        what = "zero" if lengths[bad[0]] == 0 else "not finite"
        raise ValueError(f"the vector of row {bad[0]} is {what} and has no direction to compare")
    result: Vectors = (array / lengths[:, None]).astype(np.float32)
    return result
