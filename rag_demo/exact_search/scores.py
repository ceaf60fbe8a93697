"""Pairs of a query and a row, and their exact scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rag_demo.vectors import Rows, Vectors

Scores = npt.NDArray[np.float64]

_PAIRS = 128  # scored at once, so that they stay in the processor's cache


class Pairs(NamedTuple):
    """Pairs of a query and a row that may be among its best.

    Attributes:
        query: The number of each pair's query, in ascending order: shape (p,).
        row: The number of each pair's row: shape (p,).
        scores: The `exact_scores`, if they are already known: shape (p,).
    """

    query: Rows
    row: Rows
    scores: Scores | None = None


def exact_scores(
    vectors_of: Callable[[Rows], Vectors], queries: Vectors, query: Rows, row: Rows
) -> Scores:
    """Multiply each pair of a query and a row by itself, in float64.

    The rounding of a matrix product depends on its shape and on the number of threads. These
    scores do not, so neither do ties and the order of the answers.

    Args:
        vectors_of: Returns a copy of the vectors of rows: shape (p, d).
        queries: Shape (b, d).
        query: The number of each pair's query: shape (p,).
        row: Each pair's row: shape (p,).
    """
    wide, scores = queries.astype(np.float64), np.empty(len(row))
    for start in range(0, len(row), _PAIRS):
        some = slice(start, start + _PAIRS)
        # Products of two float32 are exact in float64, and all sums have the same layout.
        products = vectors_of(row[some]).astype(np.float64)
        products *= wide.take(query[some], axis=0)
        products.sum(axis=1, out=scores[some])
    return scores
