"""Find every row that may be among the best by a scan of rounded copies with a proven bound.

For each block, the product of rounded vectors differs from the true product by at most a known
bound. Only rows that might be among the best k are kept and scored exactly.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rag_demo.exact_search.scan import BLOCK, Scan, round_to_int8
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


Array = npt.NDArray[Any]
Fetch = Callable[[Array], Any]

_SCORES = 1 << 22  # computed at once: 16 MB
_MOST_ROWS, _MOST_ROWS_OF_INT8 = 1 << 16, 1 << 18  # int8 rows are not copied to float32.
_DEVICE_STEP = 8  # times larger on a GPU, where each step costs launches and a wait
_PART = 8  # rows of a block that are compared together
_SMALL_PRODUCT = 1 << 14  # scores; they are computed before a thread has started
_FEW_QUERIES = 64
_MEASURED_ROWS, _MEASURED_DIMENSION, _MEASURED_QUERIES, _MEASURED_TIMES = 1024, 384, 256, 8
# Only duplicates and near duplicates make more pairs than these.
_MANY_PAIRS, _MANY_OF_A_QUERY = 1 << 15, 1 << 8
_POOL = 1 << 20  # candidates before the worst are dropped: 24 MB
# The error of float32: lengths are 1 within 2**-23, and so are the products of a scale and a sum
# of integers. The sums are below 2**24 and therefore exact.
_SLACK = 4e-6


def find_candidates(
    scans: Sequence[Scan],
    queries: Array,
    top_k: int,
    fetch: Fetch,
    allowed: Array | None = None,
    *,
    scratch_bytes: int | None = None,
) -> Pairs:
    """Find every row that may be among the best, for each query.

    Args:
        scans: The rounded copies of all rows, in order, on one device.
        queries: Shape (b, d), float32, each of length 1.
        top_k: How many rows are wanted, at most as many as are allowed.
        fetch: Returns the true vectors of rows: shape (n, d), float32, in host memory.
        allowed: Which rows to search: shape (n,), bool; None for all.
        scratch_bytes: Memory for scores and candidates; the minimum is 1 MB.

    Returns:
        Pairs of a query and a row, in the order of the queries. They include every row with a
        true score of at least the k-th best, and hardly any other.
    """
    import torch

    most_rows, scores, pool = _limits(scans[0].vectors.device.type, scratch_bytes)
    with torch.inference_mode():
        search = _Search(scans[0].vectors.device, queries, top_k, fetch, allowed, pool)
        for scan in scans:
            search.begin(scan)
            rows_of_step = _MOST_ROWS_OF_INT8 if search.packed is not None else most_rows
            step = max(BLOCK, min(rows_of_step, scores // len(queries)) // BLOCK * BLOCK)
            if len(scan) <= 2 * step:
                step = -(-len(scan) // BLOCK) * BLOCK
            for position, rows in scan.batches(max(step, BLOCK)):
                search.compare(position, rows)
        return search.finish()


def _limits(device: str, scratch_bytes: int | None) -> tuple[int, int, int]:
    """Return the most rows, scores and candidates at once."""
    if scratch_bytes is not None:  # A search took at most 60 times as many bytes.
        scores, pool = (max(1 << 15, min(n, scratch_bytes // 64)) for n in (_SCORES, _POOL))
        return _MOST_ROWS, scores, pool
    step = 1 if device == "cpu" else _DEVICE_STEP
    return step * _MOST_ROWS, step * _SCORES, _POOL


class _Search:
    """The search for one batch of queries, block by block."""

    def __init__(
        self,
        device: Any,
        queries: Array,
        top_k: int,
        fetch: Fetch,
        allowed: Array | None,
        most: int,
    ) -> None:
        import torch

        self._torch = torch
        self._top_k, self._fetch, self._most = top_k, fetch, most
        self._in_host = queries
        self._allowed = allowed
        self._queries = torch.from_numpy(queries).to(device)
        self._count = len(queries)
        self._product_error = _product_error(torch, queries.shape[1])
        self._is_rounded = False  # whether a score of the pool belongs to a rounded vector
        # The k best lower bounds so far, of different blocks: the k-th best score is at least that.
        self._best = torch.full((top_k, self._count), -torch.inf, device=device)
        self._least = torch.full((self._count,), -torch.inf, device=device)
        self._pool: list[tuple[Array, Array, Array, Array]] = []
        self._pooled = 0

    def begin(self, scan: Scan) -> None:
        """Begin with the rows of a scan, and choose how to multiply them."""
        torch = self._torch
        self._scan = scan
        is_int8 = scan.vectors.dtype == torch.int8
        self._is_rounded |= is_int8 or scan.vectors.dtype != torch.float32
        device = scan.vectors.device
        self.packed: Any = None
        if is_int8 and device.type == "cpu" and suits_int8(self._count):
            import numkong

            codes, *parts = round_to_int8(self._in_host, 1)
            self.packed = codes if self._count == 1 else numkong.dots_pack(codes)
            self._query_scales, self._query_bounds = map(torch.from_numpy, parts)
            return
        self._transposed = self._queries.T.contiguous()
        self._query_scales = torch.ones(self._count, device=device)
        self._query_bounds = self._query_scales * self._product_error

    def _multiply(self, rows: Any) -> Any:
        """Multiply rows and queries: shape (rows, b)."""
        if self.packed is not None:
            return self._torch.from_numpy(_int8_product(rows.numpy(), self.packed, self._count))
        return self._torch.mm(rows.float(), self._transposed)

    def compare(self, position: int, rows: Any) -> None:
        """Collect the candidates among the rows of some blocks."""
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
        errors = scan.bounds[blocks, None]
        errors = errors + (1 + errors) * self._query_bounds + _SLACK
        # The largest product of each part of each block: shape (blocks, parts, b).
        largest = parts.amax(dim=1).view(-1, BLOCK // _PART, self._count) * scales[:, None]
        lower = torch.cat([self._best, largest.amax(dim=1) - errors])
        if lower.device.type == "cpu":  # numpy is four times as fast as topk
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

    def _collect(
        self, parts: Any, scales: Any, errors: Any, part: Any, query: Any, start: int
    ) -> None:
        """Put the rows of these pairs of a part and a query into the pool."""
        at_once = min(_SCORES, 4 * self._most) // _PART
        for first in range(0, len(part), at_once):
            some = slice(first, first + at_once)
            of_part, of_query = part[some], query[some]
            block = of_part // (BLOCK // _PART)
            scores = parts[of_part, :, of_query] * scales[block, of_query, None]
            error_of = errors[block, of_query]
            bars = self._least[of_query] - error_of
            # Rows that are not allowed, or only fill up a block, are far below every true score.
            good = (scores >= bars[:, None]) & (scores > -2.0)
            pair, place = good.nonzero(as_tuple=True)
            rows = start + of_part[pair] * _PART + place
            found = (of_query[pair], rows, scores[pair, place], error_of[pair])
            query_of, row, score, error = (values.cpu().numpy() for values in found)
            self._pool.append((query_of, row, score, error))
            self._pooled += len(rows)

    def _thin(self) -> None:
        """Drop the candidates that are worse than the k-th best of the pool."""
        (query, row, _), true, errors, bars = self._rescored()
        self._pool, self._pooled = [(query, row, true.astype(np.float32), errors)], len(row)
        self._most = max(self._most, 2 * len(row))  # Many rows may tie.
        bars = (bars - (self._product_error + _SLACK)).astype(np.float32)
        least = self._torch.from_numpy(bars).to(self._least.device)
        self._least = self._torch.maximum(self._least, least)

    def finish(self) -> Pairs:
        """Return the pairs that may be among the best."""
        return self._rescored()[0]

    def _rescored(self) -> tuple[Pairs, Array, Array, Array]:
        """Score the pool, exactly if its scores belong to rounded vectors.

        Returns:
            The pairs that may be among the k best; their scores; the errors of these scores; and
            for each query a lower bound of its k-th best score.
        """
        query, row, score, error = self._sorted_pool()
        bars, first = _kth_best(query, score, self._count, self._top_k)
        if not self._is_rounded:  # All scores are float32 products of true vectors.
            kept = score >= (bars - 2 * np.float32(self._product_error))[query]
            return Pairs(query[kept], row[kept]), score[kept], error[kept], bars
        if len(query) > _MANY_PAIRS + _MANY_OF_A_QUERY * self._count:

            def bars_of(scores: Array) -> Array:
                return _kth_best(query, scores, self._count, self._top_k)[0]

            true = scores_of_many(self._fetch, self._in_host, query, row, bars_of)
            return self._best_of(query, row, true)
        # First score the apparent k best. Rows that cannot reach the worst of them are dropped.
        true = np.full(len(query), -np.inf)
        true[first] = self._scores(query[first], row[first])
        bars, _ = _kth_best(query[first], true[first], self._count, self._top_k)
        rest = np.flatnonzero(~first & (score + error >= bars[query]))
        least = bars[query[rest]] - self._product_error
        rest = rest[self._scores(query[rest], row[rest], np.float32) >= least]
        true[rest] = self._scores(query[rest], row[rest])
        return self._best_of(query, row, true)

    def _best_of(self, query: Array, row: Array, true: Array) -> tuple[Pairs, Array, Array, Array]:
        bars, _ = _kth_best(query, true, self._count, self._top_k)
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
        # numpy sorts 16-bit keys in linear time.
        small = query.astype(np.uint16) if self._count < 1 << 16 else query
        order = np.argsort(small, kind="stable")
        return query[order], row[order], score[order], error[order]


def _kth_best(query: Array, score: Array, count: int, top_k: int) -> tuple[Array, Array]:
    """Return each query's k-th best score, or -inf if it has fewer, and which pairs are the k best.

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


def suits_int8(queries: int) -> bool:
    """Tell whether a CPU should scan the int8 copy for so many queries.

    For few queries, any processor gains by reading fewer bytes. For many, a measurement of some
    milliseconds decides, once in a process.
    """
    return _has_numkong() and (queries <= _FEW_QUERIES or _int8_is_faster())


@cache
def _has_numkong() -> bool:
    return find_spec("numkong") is not None


@cache
def _int8_is_faster() -> bool:
    """Compare the int8 product of a batch with the float32 product."""
    import numkong
    import torch

    codes = np.ones((_MEASURED_ROWS, _MEASURED_DIMENSION), np.int8)
    packed = numkong.dots_pack(codes[:_MEASURED_QUERIES])
    floats = torch.from_numpy(codes.astype(np.float32))
    transposed = floats[:_MEASURED_QUERIES].T.contiguous()

    def seconds(product: Callable[[], object]) -> float:
        times = []
        for _ in range(_MEASURED_TIMES):
            started = time.perf_counter()
            product()
            times.append(time.perf_counter() - started)
        return min(times)

    return seconds(lambda: _int8_product(codes, packed, _MEASURED_QUERIES)) < seconds(
        lambda: torch.mm(floats, transposed)
    )


def _int8_product(rows: Array, packed: Any, count: int) -> Array:
    """Multiply int8 rows with packed queries in torch's threads: int32, shape (rows, b).

    A single query is not packed: numkong's ``dot`` takes half of the time then.
    """
    import numkong
    import torch

    out = numkong.empty((len(rows), count), dtype="int32")
    single = np.asarray(out)[:, 0]
    threads = torch.get_num_threads()

    def multiply(start: int, stop: int) -> None:
        if count == 1:
            single[start:stop] = numkong.dot(rows[start:stop], packed)
        else:
            numkong.dots_packed(rows, packed, out=out, start_row=start, end_row=stop)

    if len(rows) * count < _SMALL_PRODUCT or threads == 1:
        multiply(0, len(rows))
    else:
        edges = [len(rows) * part // threads for part in range(threads + 1)]
        with ThreadPoolExecutor(threads - 1) as others:
            parts = [others.submit(multiply, *each) for each in itertools.pairwise(edges[1:])]
            multiply(0, edges[1])
            for part in parts:
                part.result()
    products: Array = np.asarray(out)
    return products


def _product_error(torch: Any, dimension: int) -> float:
    """Bound the error of torch's float32 matrix product of vectors of length 1.

    The program may have allowed torch to round the factors first, to 8 bits at the worst.
    """
    exact = torch.get_float32_matmul_precision() == "highest"
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return rounding(dimension) / 2 + (0.0 if exact and not tf32 else 2.0**-7)
