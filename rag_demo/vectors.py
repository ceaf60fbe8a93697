"""Vectors: types, normalisation, rounding, exact scores, rows that grow, and work done ahead."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rag_demo.errors import BadVectorsError

Vectors = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float64]
Take = Callable[[Rows], Vectors]
"""Returns a copy of the vectors of rows: shape (n, d)."""

_PAIRS = 128  # scored at once, so that they stay in the processor's cache
_SPARE_ROWS = 64  # at least, in each new buffer


def rounding(dimension: int) -> float:
    """Bound the difference of two float32 dot products of unit vectors from the exact ones.

    Each product errs by at most d * 2**-24, whatever the order of summation: Higham, Accuracy
    and Stability of Numerical Algorithms, section 3.1.
    """
    return 4 * dimension * 2.0**-24


def normalized(vectors: Any, count: int) -> Vectors:
    """Return vectors as float32 vectors of length 1.

    Args:
        vectors: Shape (n, d).
        count: How many vectors there must be.

    Raises:
        ValueError: The shape or the number is wrong.
        BadVectorsError: A vector is zero or not finite. The message names the row.
    """
    array = np.asarray(vectors, np.float32)
    if array.ndim != 2:
        raise ValueError(f"vectors must have the shape (n, d), got {array.shape}")
    if len(array) != count:
        raise ValueError(f"got {len(array)} vectors for {count} texts; pass one for each")
    lengths = np.linalg.norm(array.astype(np.float64), axis=1)
    bad = ~np.isfinite(lengths) | (lengths == 0)
    result: Vectors = (array / np.where(bad, 1, lengths)[:, None]).astype(np.float32)
    if bad.any():
        found = np.flatnonzero(bad).tolist()
        raise BadVectorsError(
            {row: "not finite" if lengths[row] else "zero" for row in found}, result
        )
    return result


def check_dimension(vectors: Vectors, dimension: int) -> None:
    """Raise a ValueError if vectors do not have the dimension of the present ones."""
    found = vectors.shape[1]
    if found != dimension:
        what = f"the vectors have {found} dimensions, but those of the index {dimension}"
        raise ValueError(f"{what}; use the model that made it")


def shortened(vectors: Vectors, dimension: int) -> Vectors:
    """Return the first numbers of vectors, again of length 1."""
    if vectors.shape[1] == dimension:
        return vectors
    first = vectors[:, :dimension]
    result: Vectors = first / np.linalg.norm(first, axis=1, keepdims=True)
    return result


def ahead(compute: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Yield a result for each item. Meanwhile, a thread computes the next one, and no further."""
    remaining = iter(items)
    results = [compute(item) for item in itertools.islice(remaining, 1)]
    with ThreadPoolExecutor(1) as thread:  # A single item starts no thread.
        for item in remaining:
            coming = thread.submit(compute, item)
            yield results.pop()
            results.append(coming.result())
    yield from results


class Pairs(NamedTuple):
    """Pairs of a query and a row that may be among its best.

    Attributes:
        query: The number of each pair's query, in ascending order: shape (p,).
        row: The number of each pair's row: shape (p,).
        scores: The `exact_scores`: shape (p,).
    """

    query: Rows
    row: Rows
    scores: Scores


def exact_scores(take: Take, queries: Vectors, query: Rows, row: Rows) -> Scores:
    """Multiply each pair of a query and a row by itself, in float64.

    The rounding of a matrix product depends on its shape and on the number of threads. These
    scores do not, so neither do ties and the order of the answers.

    Args:
        take: Returns the vectors.
        queries: Shape (b, d).
        query: The number of each pair's query: shape (p,).
        row: Each pair's row: shape (p,).
    """
    wide, scores = queries.astype(np.float64), np.empty(len(row))
    for start in range(0, len(row), _PAIRS):
        some = slice(start, start + _PAIRS)
        # Products of two float32 are exact in float64, and all sums have the same layout.
        products = take(row[some]).astype(np.float64)
        products *= wide.take(query[some], axis=0)
        products.sum(axis=1, out=scores[some])
    return scores


class GrowableRows:
    """A snapshot of the first rows of a buffer. These rows never change.

    `append` writes behind them and returns another snapshot. So an interrupted append changes
    nothing. Append to the newest snapshot only: appending to an older one overwrites rows. All
    snapshots share one buffer, so releasing it empties all of them.

    Args:
        capacity: How many rows have room before the buffer grows.
        like: A tensor that tells the shape of a row, the dtype and the device.

    Attributes:
        error: The largest error of the rows.
    """

    __slots__ = ("_count", "_shared", "error")

    def __init__(self, capacity: int, like: Any) -> None:
        self._shared = [_empty(capacity, like)]  # A larger buffer replaces it in here.
        self._count, self.error = 0, 0.0

    def __len__(self) -> int:
        return self._count

    @property
    def buffer(self) -> Any:
        """The memory, of which only the first rows belong to the snapshot."""
        return self._shared[0]

    @property
    def rows(self) -> Any:
        """A view of the rows."""
        return self._shared[0][: self._count]

    def append(self, rows: Any, error: float = 0.0) -> GrowableRows:
        """Return a snapshot with these rows at the end, in amortised linear time."""
        longer = copy.copy(self)
        longer._count, longer.error = self._count + len(rows), max(self.error, error)
        if len(longer) > len(self.buffer):
            larger = _empty(len(longer) + len(longer) // 4 + _SPARE_ROWS, self.buffer)
            larger[: self._count] = self.rows
            self._shared[0] = larger
        self.buffer[self._count : len(longer)] = rows
        return longer


def _empty(count: int, like: Any) -> Any:
    """Return a tensor of so many rows, like another one."""
    shape = (count, *like.shape[1:])
    if not count or like.device.type != "cpu":
        return like.new_empty(shape)
    import torch

    # numpy asks the system for large pages, and torch does not. A search is a fifth faster.
    memory = np.empty((*shape[:-1], shape[-1] * like.itemsize), np.uint8)
    return torch.from_numpy(memory).view(like.dtype)
