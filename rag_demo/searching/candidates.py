"""Which rows may be among the best, found by scans of rounded copies, and by nothing that may err.

By how much the product of rounded vectors can differ from the true one is known for every block,
so whatever might belong to the best k is kept, and only that is scored exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.searching.exact_scores import exact_scores
from rag_demo.searching.int8_product import int8_product
from rag_demo.searching.scan import BLOCK, Scan, round_rows, slices
from rag_demo.searching.vector_store import Pairs
from rag_demo.vectors import rounding

__all__ = ["find_candidates"]

Array = npt.NDArray[Any]
Fetch = Callable[[Array], Any]

_SCORES = 1 << 22  # at once: 16 MB
_MOST_ROWS = 1 << 16
_DEVICE_STEP = 8  # times that, where a step costs launches, and waits for what was found
_PART = 8  # rows of a block, which are looked at together
_CONVERTED_ROWS = 1 << 10  # at once: 1.5 MB
_ROWS_OF_A_THREAD = 1 << 10
_POOL = 1 << 20  # candidates that are kept before they are thinned out: 24 MB
# What float32 adds to all of it: vectors are of length 1 within 2**-23, and so are the products
# of a scale and a sum of integers below 2**24, which are exact.
_SLACK = 4e-6


def find_candidates(
    scans: Sequence[Scan],
    queries: Array,
    top_k: int,
    fetch: Fetch,
    allowed: Array | None = None,
    *,
    exact: bool = True,
    scratch_bytes: int | None = None,
) -> Pairs:
    """Find every row that may be among the best, for each query.

    Args:
        scans: The rounded copies of all rows, in their order, on one device.
        queries: Shape (b, d), float32, each of length 1.
        top_k: How many of the best, at most as many as there are rows to search among.
        fetch: Gives the true vectors of rows: float32, in host memory, shape (n, d).
        allowed: Shape (n,), bool: the rows to search among; None for all.
        exact: Whether the true vectors are others than the rounded ones.
        scratch_bytes: What scores and candidates may take on the way; at least 1 MB is taken.

    Returns:
        Pairs of a query and a row, sorted by the query. All rows are there
        whose true score is that of the k-th best or more, and hardly any other.
    """
    import torch

    most_rows, scores, pool = _limits(scans[0].vectors.device.type, scratch_bytes)
    with torch.inference_mode():
        search = _Search(scans[0].vectors.device, queries, top_k, fetch, allowed, exact, pool)
        for scan in scans:
            step = max(BLOCK, min(most_rows, scores // len(queries)) // BLOCK * BLOCK)
            if len(scan) <= 2 * step:
                step = -(-len(scan) // BLOCK) * BLOCK
            search.begin(scan)
            for position, rows in scan.batches(max(step, BLOCK)):
                search.look_at(position, rows)
        return search.finish()


def _limits(device: str, scratch_bytes: int | None) -> tuple[int, int, int]:
    """Return how many rows and scores there may be at once, and how many candidates."""
    if scratch_bytes is not None:  # Scores exist in up to five forms, a candidate in three.
        scores, pool = (max(1 << 15, min(n, scratch_bytes // 40)) for n in (_SCORES, _POOL))
        return _MOST_ROWS, scores, pool
    step = 1 if device == "cpu" else _DEVICE_STEP
    return step * _MOST_ROWS, step * _SCORES, _POOL


class _Search:
    """One batch of queries on its way through the blocks."""

    def __init__(
        self,
        device: Any,
        queries: Array,
        top_k: int,
        fetch: Fetch,
        allowed: Array | None,
        exact: bool,
        most: int,
    ) -> None:
        import torch

        self._torch = torch
        self._top_k, self._fetch, self._exact, self._most = top_k, fetch, exact, most
        self._in_host = queries
        self._allowed = allowed
        self._queries = torch.from_numpy(queries).to(device)
        self._count = len(queries)
        self._product_error = _product_error(torch, queries.shape[1])
        self._is_rounded = False  # whether any score of the pool is of a rounded vector
        # The k best lower bounds so far, each of another block: the k-th best is at least that.
        self._best = torch.full((top_k, self._count), -torch.inf, device=device)
        self._least = torch.full((self._count,), -torch.inf, device=device)
        self._pool: list[tuple[Array, Array, Array, Array]] = []
        self._pooled = 0
        self._room: Any = None  # for products

    def begin(self, scan: Scan) -> None:
        """Go on with other rows: choose how to multiply them."""
        torch = self._torch
        self._scan = scan
        vectors = scan.vectors
        is_int8 = vectors.dtype == torch.int8
        self._by_int8: Callable[[Any, Callable[[], Any]], Any] | None = None
        product = None
        if is_int8 and vectors.device.type == "cpu":
            product = int8_product(torch, vectors.shape[1], self._count)
        if product is not None:
            rounded, self._query_scales, self._query_errors = round_rows(
                self._queries, 1, product.most
            )
            self._by_int8 = product.by(rounded)
            self._is_rounded = True
            return
        ones = torch.ones(self._count, device=vectors.device)
        self._transposed = self._queries.T.contiguous()
        self._query_scales, self._query_errors = ones, ones * self._product_error
        self._is_rounded |= is_int8 or (self._exact and vectors.dtype != torch.float32)

    # A method: in an attribute it would make a cycle, and the scan would stay until a collection.
    def _multiply(self, rows: Any) -> Any:
        torch, by_int8 = self._torch, self._by_int8
        if by_int8 is not None:
            return by_int8(rows, lambda: self._room_for(len(rows), torch.int32))
        return _product_of_floats(rows, self._transposed, self._room_for(len(rows), torch.float32))

    def look_at(self, position: int, rows: Any) -> None:
        """Take the rows of a few blocks."""
        torch, scan = self._torch, self._scan
        start = scan.start + position
        stop = start + len(rows)
        blocks = slice(position // BLOCK, -(-(position + len(rows)) // BLOCK))
        products = self._multiply(rows)  # shape (rows, b)
        lowest = -1e9 if products.is_floating_point() else torch.iinfo(products.dtype).min // 2
        if self._allowed is not None:
            others = np.flatnonzero(~self._allowed[start:stop])
            if len(others):
                products.index_fill_(0, torch.from_numpy(others).to(products.device), lowest)
        if len(rows) % BLOCK:
            products = torch.nn.functional.pad(
                products, (0, 0, 0, -len(rows) % BLOCK), value=lowest
            )
        parts = products.view(-1, _PART, self._count)
        scales = scan.scales[blocks, None] * self._query_scales
        errors = scan.errors[blocks, None]
        if not self._exact:
            errors = torch.zeros_like(errors)
        errors = errors + (1 + errors) * self._query_errors + _SLACK
        # Of the parts of each block: shape (blocks, parts of one, b).
        largest = parts.amax(dim=1).view(-1, BLOCK // _PART, self._count) * scales[:, None]
        lower = torch.cat([self._best, largest.amax(dim=1) - errors])
        if lower.device.type == "cpu":  # numpy does that four times as fast.
            ordered = np.partition(lower.T.contiguous().numpy(), -self._top_k, axis=1)
            self._best = torch.from_numpy(ordered[:, -self._top_k :]).T
        else:
            self._best = lower.topk(self._top_k, dim=0).values
        self._least = torch.maximum(self._least, self._best.amin(dim=0))
        highest = largest.add_(errors[:, None]).view(-1, self._count)
        part, query = (highest >= self._least).nonzero(as_tuple=True)
        if self._pooled + len(part) * _PART > 8 * self._most:
            self._thin()
            keep = highest[part, query] >= self._least[query]
            part, query = part[keep], query[keep]
        self._collect(parts, scales, errors, part, query, start)
        if self._pooled > self._most:
            self._thin()

    def _room_for(self, count: int, kind: Any) -> Any:
        """Return room for the products of so many rows."""
        room = self._room
        if room is None or room.dtype != kind or len(room) < count:
            device = self._scan.vectors.device
            self._room = room = self._torch.empty(count, self._count, dtype=kind, device=device)
        return room[:count]

    def _collect(
        self, parts: Any, scales: Any, errors: Any, part: Any, query: Any, start: int
    ) -> None:
        """Keep the rows of these pairs of part and query that may be among the best."""
        at_once = min(_SCORES, 4 * self._most) // _PART
        for first in range(0, len(part), at_once):
            some = slice(first, first + at_once)
            its_part, its_query = part[some], query[some]
            its_block = its_part // (BLOCK // _PART)
            scores = parts[its_part, :, its_query] * scales[its_block, its_query, None]
            its_errors = errors[its_block, its_query]
            bars = self._least[its_query] - its_errors
            # What is not allowed, or only fills up a block, is far below every true score.
            good = (scores >= bars[:, None]) & (scores > -2.0)
            pair, place = good.nonzero(as_tuple=True)
            rows = start + its_part[pair] * _PART + place
            found = (its_query[pair], rows, scores[pair, place], its_errors[pair])
            query_of, row, score, error = (values.cpu().numpy() for values in found)
            self._pool.append((query_of, row, score, error))
            self._pooled += len(rows)

    def _thin(self) -> None:
        """Keep of the pool what is at least as good as the k-th best of it."""
        (query, row, _), true, errors, bars = self._rescored()
        self._pool, self._pooled = [(query, row, true.astype(np.float32), errors)], len(row)
        bars = (bars - (self._product_error + _SLACK)).astype(np.float32)
        least = self._torch.from_numpy(bars).to(self._least.device)
        self._least = self._torch.maximum(self._least, least)

    def finish(self) -> Pairs:
        """Return what may be among the best."""
        return self._rescored()[0]

    def _rescored(self) -> tuple[Pairs, Array, Array, Array]:
        """Score the pool, exactly if scores so far are of rounded vectors.

        Returns:
            What may be among the k best; its scores, and by how much they may err; and each
            query's k-th best score, or less.
        """
        query, row, score, error = self._sorted_pool()
        bars, first = _kth_best(query, score, self._count, self._top_k)
        if not self._is_rounded:  # All scores are products in float32 already.
            kept = score >= (bars - 2 * np.float32(self._product_error))[query]
            return Pairs(query[kept], row[kept]), score[kept], error[kept], bars
        # First those that look best. None of the others matters that cannot reach the worst.
        true = np.full(len(query), -np.inf)
        true[first] = self._scores(query[first], row[first])
        bars, _ = _kth_best(query[first], true[first], self._count, self._top_k)
        rest = np.flatnonzero(~first & (score + error >= bars[query]))
        its_bars = bars[query[rest]] - self._product_error
        rest = rest[self._scores(query[rest], row[rest], np.float32) >= its_bars]
        true[rest] = self._scores(query[rest], row[rest])
        kept = true >= bars[query]
        query, row, true = query[kept], row[kept], true[kept]
        error = np.full(len(query), self._product_error + _SLACK, np.float32)
        return Pairs(query, row, true), true, error, bars

    def _scores(self, query: Array, row: Array, kind: type[np.floating[Any]] = np.float64) -> Array:
        return exact_scores(self._fetch, self._in_host, query, row, kind)

    def _sorted_pool(self) -> tuple[Array, Array, Array, Array]:
        if not self._pool:
            empty = np.empty(0, np.int64)
            return empty, empty, np.empty(0, np.float32), np.empty(0, np.float32)
        query, row, score, error = (np.concatenate(each) for each in zip(*self._pool, strict=True))
        # By a key of 16 bits, which numpy sorts in linear time.
        small = query.astype(np.uint16) if self._count < 1 << 16 else query
        order = np.argsort(small, kind="stable")
        return query[order], row[order], score[order], error[order]


def _kth_best(query: Array, score: Array, count: int, top_k: int) -> tuple[Array, Array]:
    """Return each query's k-th best score, -inf if it has fewer, and which are the k best.

    Args:
        query: Shape (p,), sorted.
        score: Shape (p,).
        count: How many queries there are.
        top_k: The k.
    """
    import torch

    starts = np.searchsorted(query, np.arange(count + 1))
    widest = int(np.diff(starts).max(initial=0))
    if widest < top_k:
        return np.full(count, -np.inf, score.dtype), np.ones(len(query), bool)
    if len(query) == count * top_k == count * widest:
        return score.reshape(count, top_k).min(axis=1), np.ones(len(query), bool)
    places = np.arange(len(query)) - starts[query]
    padded = np.full((count, widest), -np.inf, score.dtype)
    padded[query, places] = score
    best = torch.from_numpy(padded).topk(top_k, dim=1)
    chosen = np.zeros((count, widest), bool)
    np.put_along_axis(chosen, best.indices.numpy(), True, axis=1)
    return best.values[:, -1].numpy(), chosen[query, places]


def _product_of_floats(rows: Any, transposed: Any, out: Any) -> Any:
    """Multiply rows of any type as float32; what is converted stays in the processor's cache."""
    import torch

    if rows.dtype == torch.float32 or rows.device.type != "cpu":
        return torch.mm(rows.float(), transposed, out=out)
    if rows.dtype == torch.int8 and transposed.shape[1] == 1:
        _product_with_one(rows.numpy(), transposed.numpy()[:, 0], out.numpy()[:, 0])
        return out
    converted = torch.empty(min(_CONVERTED_ROWS, len(rows)), rows.shape[1])
    for some in slices(0, len(rows), _CONVERTED_ROWS):
        its = converted[: some.stop - some.start].copy_(rows[some])
        if transposed.shape[1] == 1:  # For one query numpy is faster.
            np.dot(its.numpy(), transposed.numpy(), out=out[some].numpy())
        else:
            torch.mm(its, transposed, out=out[some])
    return out


def _product_with_one(rows: Array, query: Array, out: Array) -> None:
    """Multiply int8 rows with one query, a half in each of two threads.

    By what a thread does by itself. The products of libraries hand each thousand rows to threads
    of their own and wait for them, which takes a hundred times as long on a busy machine.
    """

    def multiply(part: slice) -> None:
        converted = np.empty((min(_ROWS_OF_A_THREAD, len(rows)), rows.shape[1]), np.float32)
        for some in slices(part.start, part.stop, _ROWS_OF_A_THREAD):
            its = converted[: some.stop - some.start]
            np.copyto(its, rows[some])
            np.einsum("ij,j->i", its, query, out=out[some])

    if len(rows) <= _ROWS_OF_A_THREAD:
        multiply(slice(0, len(rows)))
        return
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(multiply, slices(0, len(rows), -(-len(rows) // 2))))


def _product_error(torch: Any, dimension: int) -> float:
    """Bound the error of a float32 matrix product of vectors of length 1.

    As `rounding` says, unless the program has allowed torch to round the factors first: to 8
    bits at the worst.
    """
    exact = torch.get_float32_matmul_precision() == "highest"
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return rounding(dimension) / 2 + (0.0 if exact and not tf32 else 2.0**-7)
