"""Exact scores, and the plain product that finds candidates among few rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rag_demo.vectors import Mask, Rows, Vectors, rounding

Scores = npt.NDArray[np.float64]

FEW_ROWS = 1 << 15
"""Up to so many rows are multiplied with a single query without further threads."""
_FLOAT64_ERROR = 1e-12  # of a float64 product of vectors of length 1
Bars = Callable[[Scores], Scores]
_PAIRS = 128  # scored at once, so that they stay in the processor's cache
_ROWS = 1 << 10  # multiplied at once by `candidates_of_batch`


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
    vectors_of: Callable[[Rows], Vectors],
    queries: Vectors,
    query: Rows,
    row: Rows,
    kind: type[np.floating[Any]] = np.float64,
) -> Scores:
    """Multiply each pair of a query and a row by itself.

    The rounding of a matrix product depends on its shape and on the number of threads. These
    scores do not, so neither do ties and the order of the answers.

    Args:
        vectors_of: Returns a copy of the vectors of rows: shape (p, d).
        queries: Shape (b, d).
        query: The number of each pair's query: shape (p,).
        row: Each pair's row: shape (p,).
        kind: The precision. float32 takes half of the time.
    """
    wide = queries.astype(kind, copy=False)
    scores = np.empty(len(row))
    for start in range(0, len(row), _PAIRS):
        some = slice(start, start + _PAIRS)
        # Products of two float32 are exact in float64, and all sums have the same layout.
        vectors, factors = vectors_of(row[some]), wide.take(query[some], axis=0)
        if kind is np.float32:  # in one pass
            scores[some] = np.einsum("ij,ij->i", vectors, factors)
            continue
        products = vectors.astype(kind, copy=False)
        products *= factors
        products.sum(axis=1, out=scores[some])
    return scores


def scores_of_many(
    vectors_of: Callable[[Rows], Vectors], queries: Vectors, query: Rows, row: Rows, bars_of: Bars
) -> Scores:
    """Score many pairs, of which most are not among the best: duplicates and near duplicates.

    Equal vectors are scored once. A matrix product in float64 tells which pairs may be among the
    best, and only these get their `exact_scores`; the other scores are within 1e-12.

    Args:
        vectors_of, queries, query, row: See `exact_scores`.
        bars_of: Returns the score of the k-th best pair of each query: shape (b,).
    """
    rows, place = np.unique(row, return_inverse=True)
    first, same = _distinct(vectors_of, rows)
    rows, vector = rows[first], same[place]  # of each distinct vector; of each pair
    scores = np.empty(len(row))
    order = np.argsort(vector, kind="stable")
    starts = np.arange(0, len(rows) + _ROWS, _ROWS)
    wide = queries.astype(np.float64).T
    for start, (begin, end) in zip(
        starts.tolist(), itertools.pairwise(np.searchsorted(vector[order], starts)), strict=False
    ):
        products = vectors_of(rows[start : start + _ROWS]).astype(np.float64) @ wide
        some = order[begin:end]
        scores[some] = products[vector[some] - start, query[some]]
    near = np.flatnonzero(scores >= (bars_of(scores) - _FLOAT64_ERROR)[query])
    pairs, pair = np.unique(query[near] * len(rows) + vector[near], return_inverse=True)
    exact = exact_scores(vectors_of, queries, pairs // len(rows), rows[pairs % len(rows)])
    scores[near] = exact[pair]
    return scores


def _distinct(vectors_of: Callable[[Rows], Vectors], rows: Rows) -> tuple[Rows, Rows]:
    """Find equal vectors.

    Returns:
        The place in ``rows`` of each distinct vector, and the distinct vector of each row.
    """
    factors: Any = None
    hashes = np.empty(len(rows), np.uint64)
    for start in range(0, len(rows), _ROWS):
        bits = vectors_of(rows[start : start + _ROWS]).view(np.uint32).astype(np.uint64)
        if factors is None:
            factors = np.random.default_rng(0).integers(1, 2**63, bits.shape[1], np.uint64) * 2 + 1
        bits *= factors
        bits.sum(axis=1, out=hashes[start : start + _ROWS])
    _, first, same = np.unique(hashes, return_index=True, return_inverse=True)
    for start in range(0, len(rows), _ROWS):  # Two vectors may have the same hash.
        stop = start + _ROWS
        twins = vectors_of(rows[first[same[start:stop]]])
        if not np.array_equal(vectors_of(rows[start:stop]), twins):
            return np.arange(len(rows)), np.arange(len(rows))
    return first, same


def direct_candidates(
    parts: Sequence[Vectors], queries: Vectors, top_k: int, allowed: Mask | None = None
) -> Pairs:
    """Multiply all rows with a few queries, and keep those that may be among the best.

    Args:
        parts: Consecutive parts of the vectors: shape (n, d) each.
        queries: Shape (b, d).
        top_k: How many rows are wanted, at most as many as are allowed.
        allowed: Which rows to search: shape (rows,); None for all.
    """
    products = [_products(part, queries) for part in parts]
    scores = products[0] if len(products) == 1 else np.concatenate(products, axis=1)
    if allowed is not None:
        scores[:, ~allowed] = -np.inf
    bars = np.partition(scores, -top_k, axis=1)[:, -top_k] - rounding(queries.shape[1])
    query, row = np.nonzero(scores >= bars[:, None])
    return Pairs(query, row)


def _products(rows: Vectors, queries: Vectors) -> Vectors:
    """Multiply rows with queries: shape (b, n); use one thread for a query and few rows.

    numpy's ``@`` uses further threads and waits for them. For 10,000 rows that saves nothing, and
    on a busy machine it takes ten times as long.
    """
    products: Vectors
    if len(queries) > 1 or len(rows) > FEW_ROWS:
        products = queries @ rows.T if len(queries) > 1 else (rows @ queries[0])[None]
    elif hasattr(np, "vecdot"):
        products = np.vecdot(rows, queries[0])[None]
    else:  # numpy 1
        products = np.einsum("ij,j->i", rows, queries[0])[None]
    return products
