"""Which rows may be among the best, by multiplying all of them: where that is least work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rag_demo.searching.vector_store import Pairs
from rag_demo.vectors import Rows, Vectors, rounding

__all__ = ["FEW_ROWS", "best_among", "best_of_all"]

_AT_ONCE = 1 << 10  # rows
FEW_ROWS = 1 << 15
"""As many are multiplied at once for a single query, in the thread of the call."""


def best_of_all(
    parts: Sequence[Vectors], query: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
) -> Pairs:
    """Multiply vectors with one query."""
    products = [_products(part, query) for part in parts]
    scores = products[0] if len(products) == 1 else np.concatenate(products)
    if allowed is not None:
        scores[~allowed] = -np.inf
    bar = np.partition(scores, -top_k)[-top_k] - rounding(len(query))
    rows = np.flatnonzero(scores >= bar)
    return Pairs(np.zeros(len(rows), np.int64), rows)


def best_among(
    rows: Rows, queries: Vectors, top_k: int, vectors_of: Callable[[Rows], Vectors]
) -> Pairs:
    """Look at some rows only, at most a few thousand.

    Args:
        rows: Their numbers, in order.
        queries: Shape (b, d).
        top_k: At most as many as there are rows.
        vectors_of: Returns their vectors.
    """
    scores = np.empty((len(queries), len(rows)), np.float32)
    for start in range(0, len(rows), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
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
