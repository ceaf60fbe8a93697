"""Scores that nothing but the two vectors decides: in float64, each by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.vectors import Rows, Vectors

__all__ = ["Scores", "exact_scores"]

Scores = npt.NDArray[np.float64]

_PAIRS = 128  # scored at once: what they take stays in the processor's cache


def exact_scores(
    vectors_of: Callable[[Rows], Vectors],
    queries: Vectors,
    query: Rows,
    row: Rows,
    kind: type[np.floating[Any]] = np.float64,
) -> Scores:
    """Multiply pairs of a query and a row, each by itself.

    How a matrix product rounds depends on its shape and on the count of threads; this does
    not, so neither do scores, ties and the order of the answers.

    Args:
        vectors_of: Returns a copy of the vectors of rows: shape (p, d).
        queries: Shape (b, d).
        query: The number of each pair's query: shape (p,).
        row: Each pair's row: shape (p,).
        kind: With float32 it takes half of the time, and errs as products of floats do.
    """
    wide = queries.astype(kind, copy=False)
    scores = np.empty(len(row))
    for start in range(0, len(row), _PAIRS):
        some = slice(start, start + _PAIRS)
        # Products of two float32 are exact in float64; sums are those of this very layout.
        vectors, its = vectors_of(row[some]), wide.take(query[some], axis=0)
        if kind is np.float32:  # in one pass
            scores[some] = np.einsum("ij,ij->i", vectors, its)
            continue
        products = vectors.astype(kind, copy=False)
        products *= its
        products.sum(axis=1, out=scores[some])
    return scores
