"""Candidates of a search, the plain product that finds them among few rows, and exact scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rag_demo.vectors import Rows, Vectors, rounding

__all__ = ["FEW_ROWS", "Pairs", "Scores", "all_candidates", "exact_scores", "some_candidates"]

Scores = npt.NDArray[np.float64]

FEW_ROWS = 1 << 15
"""As many are multiplied with a single query in the thread of the call."""
_PAIRS = 128  # scored at once: what they take stays in the processor's cache
_ROWS = 1 << 10  # of some_candidates at once


class Pairs(NamedTuple):
    """Queries and rows that may be among their best.

    Attributes:
        query: The number of each pair's query, sorted: shape (p,).
        row: Shape (p,).
        scores: As of `exact_scores`, if they are known already: shape (p,).
    """

    query: Rows
    row: Rows
    scores: Scores | None = None


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


def all_candidates(
    parts: Sequence[Vectors], query: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
) -> Pairs:
    """Multiply all rows with one query, and keep what may be among the best.

    Args:
        parts: The vectors, one part behind the other: shape (n, d) each.
        query: Shape (d,).
        top_k: How many are the best, at most as many as are allowed.
        allowed: Which rows to look at: shape (rows,); None for all.
    """
    products = [_products(part, query) for part in parts]
    scores = products[0] if len(products) == 1 else np.concatenate(products)
    if allowed is not None:
        scores[~allowed] = -np.inf
    bar = np.partition(scores, -top_k)[-top_k] - rounding(len(query))
    rows = np.flatnonzero(scores >= bar)
    return Pairs(np.zeros(len(rows), np.int64), rows)


def some_candidates(
    rows: Rows, queries: Vectors, top_k: int, vectors_of: Callable[[Rows], Vectors]
) -> Pairs:
    """Multiply a few thousand rows with queries of shape (b, d); else as `all_candidates`."""
    scores = np.empty((len(queries), len(rows)), np.float32)
    for start in range(0, len(rows), _ROWS):
        some = slice(start, start + _ROWS)
        its = vectors_of(rows[some])
        scores[:, some] = queries @ its.T if len(queries) > 1 else _products(its, queries[0])
    bars = np.partition(scores, -top_k, axis=1)[:, -top_k] - rounding(queries.shape[1])
    query, place = np.nonzero(scores >= bars[:, None])
    return Pairs(query, rows[place])


def _products(rows: Vectors, query: Vectors) -> Vectors:
    """Multiply rows with one query; few of them in the thread of the call.

    numpy's ``@`` hands a part to a thread of its library's and waits for it. Of 10,000 rows that
    saves nothing, and on a busy machine it takes ten times as long.
    """
    products: Vectors
    if len(rows) > FEW_ROWS:
        products = rows @ query
    elif hasattr(np, "vecdot"):
        products = np.vecdot(rows, query)
    else:  # numpy 1
        products = np.einsum("ij,j->i", rows, query)
    return products
