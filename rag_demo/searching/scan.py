"""An exact top-k over many vectors, by a scan that reads fewer bytes and a bound that is proven.

The scan compares rounded copies of the vectors: int8 where the processor multiplies those fast,
else what is stored. By how much such a product can differ from the true one is known for every
block of rows, so whatever might belong to the best k is kept, and only that is scored exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.searching.int8_product import int8_product
from rag_demo.vectors import rounding

__all__ = ["BLOCK", "Scan", "make_scan"]

Array = npt.NDArray[Any]

BLOCK = 32  # rows that share a scale and a bound
_SCORES = 1 << 22  # at once: 16 MB
_MOST_ROWS = 1 << 16
_GROUP = 32  # queries whose candidates are rescored together
_GROUP_ROWS = 4096
_POOL = 1 << 20  # candidates that are kept before they are thinned out: 20 MB
# What float32 adds to all of it: vectors are of length 1 within 2**-23, and so are the products
# of a scale and a sum of integers below 2**24, which are exact.
_SLACK = 4e-6
_FLOAT_ERRORS = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass
class Scan:
    """The rounded copies of n vectors of length 1, in blocks of `BLOCK` rows.

    Attributes:
        vectors: Shape (n, d): int8, or a float type of torch, on its device.
        scales: Shape (blocks,), float32: a value of ``vectors`` times this is the true value,
            rounded.
        errors: Shape (blocks,), float32: no row of a block is further than this from its
            rounded copy, by Euclidean distance.
    """

    vectors: Any
    scales: Any
    errors: Any

    def __len__(self) -> int:
        return int(self.vectors.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(t.numel() * t.element_size() for t in (self.vectors, self.scales, self.errors))

    @classmethod
    def of_floats(cls, vectors: Any) -> Scan:
        """Make one of a tensor of a float type as it is, on its device."""
        import torch

        name = str(vectors.dtype).removeprefix("torch.")
        error = _FLOAT_ERRORS[name] + (2.0**-20 if name == "float16" else 0.0)  # its subnormals
        blocks = -(-len(vectors) // BLOCK)
        return cls(
            vectors,
            torch.ones(blocks, device=vectors.device),
            torch.full((blocks,), error, device=vectors.device),
        )

    def unscaled(self, values: Any, rows: Any) -> Any:
        """Turn values of these rows (all, if None) into what they stand for."""
        scales = self.scales.repeat_interleave(BLOCK)[: len(self)]
        return values * (scales if rows is None else scales[rows])[:, None]

    def candidates(
        self,
        queries: Array,
        top_k: int,
        fetch: Callable[[Array], Any],
        allowed: Array | None = None,
        *,
        exact: bool = True,
    ) -> tuple[Array, Array]:
        """Find every row that may be among the best, for each query.

        Args:
            queries: Shape (b, d), float32, each of length 1.
            top_k: How many of the best, at most as many as there are rows to search among.
            fetch: Gives the true vectors of rows, as a float32 tensor in host memory.
            allowed: Shape (n,), bool: the rows to search among; None for all.
            exact: Whether the true vectors are others than the rounded ones.

        Returns:
            Pairs of the number of a query and a row, sorted by the query. All rows are there
            whose true score is that of the k-th best or more, and hardly any other.
        """
        import torch

        with torch.inference_mode():
            errors = self.errors if exact else torch.zeros_like(self.errors)
            search = _Search(replace(self, errors=errors), queries, top_k, fetch, allowed)
            step = max(BLOCK, min(_MOST_ROWS, _SCORES // len(queries)) // BLOCK * BLOCK)
            if len(self) <= 2 * step:
                step = -(-len(self) // BLOCK) * BLOCK
            for start, rows in self.batches(step):
                search.look_at(start, rows)
            return search.finish()

    def batches(self, step: int) -> Iterator[tuple[int, Any]]:
        """Yield the vectors, ``step`` rows at a time, with the number of the first."""
        for start in range(0, len(self), step):
            yield start, self.vectors[start : start + step]


def make_scan(vectors: Array, kind: str, device: str) -> Scan:
    """Round vectors: to "int8", "float16" or "bfloat16", or not at all ("float32")."""
    import torch

    source = torch.from_numpy(vectors)
    if kind != "int8":
        return Scan.of_floats(source.to(device=device, dtype=getattr(torch, kind)))
    blocks = -(-len(vectors) // BLOCK)
    rounded = torch.empty(source.shape, dtype=torch.int8)
    scales, errors = torch.empty(blocks), torch.empty(blocks)
    for rows in slices(0, len(vectors), _MOST_ROWS):
        its = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        rounded[rows], scales[its], errors[its] = _round(source[rows], BLOCK)
    return Scan(rounded.to(device), scales.to(device), errors.to(device))


def _round(vectors: Any, block: int) -> tuple[Any, Any, Any]:
    """Round rows to int8 with one scale for each block; say how far off the worst row is."""
    import torch

    count = len(vectors)
    padded = torch.nn.functional.pad(vectors, (0, 0, 0, -count % block)).view(
        -1, block, vectors.shape[1]
    )
    scales = padded.abs().amax(dim=(1, 2)).clamp_min(1e-30) / 127
    values = (padded / scales[:, None, None]).round_().clamp_(-127, 127)
    # Rounded up, for the result rests on it: float32 errs by far less than what is added.
    distances = (padded - values * scales[:, None, None]).norm(dim=2)
    errors = distances.amax(dim=1) * (1 + 1e-4) + 1e-6
    return values.to(torch.int8).view(-1, vectors.shape[1])[:count], scales, errors


class _Search:
    """One batch of queries on its way through the blocks."""

    def __init__(
        self,
        scan: Scan,
        queries: Array,
        top_k: int,
        fetch: Callable[[Array], Any],
        allowed: Array | None,
    ) -> None:
        import torch

        self._torch = torch
        self._scan, self._top_k, self._fetch = scan, top_k, fetch
        self._in_host = torch.from_numpy(queries)
        device = scan.vectors.device
        self._allowed = None if allowed is None else torch.from_numpy(allowed).to(device)
        self._queries = torch.from_numpy(queries).to(device)
        self._count = len(queries)
        self._multiply = self._prepare()
        # The k best lower bounds so far, each of another block: the k-th best is at least that.
        self._best = torch.full((top_k, self._count), -torch.inf, device=device)
        self._least = torch.full((self._count,), -torch.inf, device=device)
        self._pool: list[tuple[Array, Array, Array]] = []
        self._pooled = 0

    def _prepare(self) -> Callable[[Any], Any]:
        """Choose how to multiply; sets the queries' own scales and errors."""
        torch = self._torch
        vectors = self._scan.vectors
        product = int8_product(torch, vectors.shape[1]) if vectors.device.type == "cpu" else None
        ones = torch.ones(self._count, device=vectors.device)
        self._query_scales, self._query_errors = ones, torch.zeros_like(ones)
        if vectors.dtype == torch.int8 and product is not None:
            rounded, scales, errors = _round(self._queries, 1)
            self._query_scales, self._query_errors = scales, errors
            transposed = rounded.T
            return lambda rows: product(rows, transposed)
        transposed = self._queries.T.contiguous()
        dimension = self._queries.shape[1]
        self._query_errors = ones * _product_error(torch, dimension)
        return lambda rows: rows.float() @ transposed

    def look_at(self, start: int, rows: Any) -> None:
        """Take the rows of a few blocks."""
        torch, scan = self._torch, self._scan
        whole = len(rows) // BLOCK * BLOCK
        if 0 < whole < len(rows):  # Only the last block has to be filled up, and copied for it.
            self.look_at(start, rows[:whole])
            start, rows = start + whole, rows[whole:]
        stop = start + len(rows)
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        products = self._multiply(rows)  # shape (rows, b)
        lowest = torch.iinfo(products.dtype).min // 2 if not products.is_floating_point() else -1e9
        if self._allowed is not None:
            products.masked_fill_(~self._allowed[start:stop, None], lowest)
        if (stop - start) % BLOCK:
            missing = BLOCK - (stop - start) % BLOCK
            products = torch.nn.functional.pad(products, (0, 0, 0, missing), value=lowest)
        grouped = products.view(-1, BLOCK, self._count)
        scales = scan.scales[blocks, None] * self._query_scales
        errors = scan.errors[blocks, None]
        errors = errors + (1 + errors) * self._query_errors + _SLACK
        largest = grouped.amax(dim=1) * scales  # shape (blocks, b)
        lower = torch.cat([self._best, largest - errors])
        self._best = lower.topk(self._top_k, dim=0).values
        self._least = torch.maximum(self._least, self._best[-1])
        block, query = (largest + errors >= self._least).nonzero(as_tuple=True)
        if self._pooled + len(block) * BLOCK > 8 * _POOL:
            self._thin()
            keep = largest[block, query] + errors[block, query] >= self._least[query]
            block, query = block[keep], query[keep]
        self._collect(grouped, scales, errors, block, query, start)
        if self._pooled > _POOL:
            self._thin()

    def _collect(
        self, grouped: Any, scales: Any, errors: Any, block: Any, query: Any, start: int
    ) -> None:
        """Keep the rows of these pairs of block and query that may be among the best."""
        for first in range(0, len(block), _SCORES // BLOCK):
            some = slice(first, first + _SCORES // BLOCK)
            its_block, its_query = block[some], query[some]
            scores = grouped[its_block, :, its_query] * scales[its_block, its_query, None]
            bars = self._least[its_query] - errors[its_block, its_query]
            # What is not allowed, or only fills up a block, is far below every true score.
            good = (scores >= bars[:, None]) & (scores > -2.0)
            pair, position = good.nonzero(as_tuple=True)
            rows = start + its_block[pair] * BLOCK + position
            found = (its_query[pair], rows, scores[pair, position])
            self._pool.append(tuple(values.cpu().numpy() for values in found))
            self._pooled += len(rows)

    def _thin(self) -> None:
        """Keep of the pool what is at least as good as the k-th best of it."""
        query, row, true, bars = self._rescored()
        self._pool, self._pooled = [(query, row, true)], len(row)
        error = _product_error(self._torch, self._in_host.shape[1])
        bars = (bars - np.float32(error + _SLACK)).astype(np.float32)
        least = self._torch.from_numpy(bars).to(self._least.device)
        self._least = self._torch.maximum(self._least, least)

    def finish(self) -> tuple[Array, Array]:
        """Return what may be among the best."""
        query, row, _, _ = self._rescored()
        return query, row

    def _rescored(self) -> tuple[Array, Array, Array, Array]:
        """Score the pool in float32.

        Returns:
            What may be among the k best, sorted by query; its scores; and each query's k-th.
        """
        query, row, score = self._sorted_pool()
        worst = float(self._scan.errors.max()) if len(self._scan) else 0.0
        errors = worst + (1 + worst) * self._query_errors.cpu().numpy() + _SLACK
        margin = 2 * np.float32(_product_error(self._torch, self._in_host.shape[1]))
        # First those that look best. None of the others matters that cannot reach the worst.
        _, first = _kth_best(query, score, self._count, self._top_k)
        true = np.full(len(query), -np.inf, np.float32)
        true[first] = self._products(query[first], row[first])
        bars, _ = _kth_best(query[first], true[first], self._count, self._top_k)
        rest = ~first & (score >= (bars - errors - margin)[query])
        true[rest] = self._products(query[rest], row[rest])
        bars, _ = _kth_best(query, true, self._count, self._top_k)
        kept = (first | rest) & (true >= (bars - margin)[query])
        return query[kept], row[kept], true[kept], bars

    def _sorted_pool(self) -> tuple[Array, Array, Array]:
        if not self._pool:
            empty = np.empty(0, np.int64)
            return empty, empty, np.empty(0, np.float32)
        query, row, score = (np.concatenate(each) for each in zip(*self._pool, strict=True))
        # By a key of 16 bits, which numpy sorts in linear time.
        small = query.astype(np.uint16) if self._count < 1 << 16 else query
        order = np.argsort(small, kind="stable")
        return query[order], row[order], score[order]

    def _products(self, query: Array, row: Array) -> Array:
        """Multiply pairs: a few queries at once with all of their rows, and most of it unused.

        That is less work than it seems: a matrix product is what processors do best.
        """
        result = np.empty(len(query), np.float32)
        starts = np.searchsorted(query, np.arange(0, self._count + _GROUP, _GROUP))
        for group, (start, stop) in enumerate(itertools.pairwise(starts)):
            queries = self._in_host[group * _GROUP : (group + 1) * _GROUP]
            for some in slices(int(start), int(stop), _GROUP_ROWS):
                products = self._fetch(row[some]) @ queries.T
                pairs = np.arange(some.stop - some.start), query[some] - group * _GROUP
                result[some] = products.numpy()[pairs]
        return result


def _kth_best(query: Array, score: Array, count: int, top_k: int) -> tuple[Array, Array]:
    """Return each query's k-th best score, -inf if it has fewer, and which are the k best.

    Args:
        query: Shape (p,), sorted.
        score: Shape (p,), float32.
        count: How many queries there are.
        top_k: The k.
    """
    import torch

    starts = np.searchsorted(query, np.arange(count + 1))
    widest = int(np.diff(starts).max(initial=0))
    if widest < top_k:
        return np.full(count, -np.inf, np.float32), np.ones(len(query), bool)
    padded = np.full((count, widest), -np.inf, np.float32)
    padded[query, np.arange(len(query)) - starts[query]] = score
    best = torch.from_numpy(padded).topk(top_k, dim=1)
    chosen = np.zeros((count, widest), bool)
    np.put_along_axis(chosen, best.indices.numpy(), True, axis=1)
    return best.values[:, -1].numpy(), chosen[query, np.arange(len(query)) - starts[query]]


def _product_error(torch: Any, dimension: int) -> float:
    """Bound the error of a float32 matrix product of vectors of length 1.

    As `rounding` says, unless the program has allowed torch to round the factors first: to 8
    bits at the worst.
    """
    exact = torch.get_float32_matmul_precision() == "highest"
    tf32 = torch.backends.cuda.matmul.allow_tf32
    return rounding(dimension) / 2 + (0.0 if exact and not tf32 else 2.0**-7)


def slices(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield slices that cover the rows from ``start`` to ``stop``."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
