"""Exact search on any device: one pass, a proven bound, and float64 for the few candidates.

`search` multiplies all rows with the queries, in the fastest precision of the device. Every row
that can be among the best is a candidate. Candidates are scored again in float64.

Why the answers are exact. Let v be a row and q a query, both float32 of length 1, and let v' and q'
be their copies in the precision of the pass. The true score is t = <v, q>. For the computed score
s:

1. The difference of the products is ``<v - v', q'> + <v, q - q'>``. By the inequality of Cauchy
   and Schwarz it is at most ``|v - v'| |q'| + |v| |q - q'|``. The distances are measured when the
   copies are made; the largest ``|v - v'|`` counts for all rows.
2. Summing d products with unit roundoff u errs by at most ``d u / (1 - d u)`` times the sum of
   their magnitudes, in any order (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
   That sum is at most ``|v'| |q'|``, by the same inequality. `rounding` allows twice as much.
3. Storing a score in a narrower dtype changes it by at most its unit roundoff times the score.

Let e be the sum of 1 and 2, r a little more than that unit roundoff, and
``lower(x) = x - e - r |x|``. Then t is at least ``lower(s)``, and s is at least ``lower(t)``.

Rows are compared in blocks. Let m be the k-th largest of the maxima of the blocks. Then k rows have
a computed score of m or more, and a true score of ``lower(m)`` or more. So a row whose computed
score is below ``lower(lower(m))`` is worse than k others, and cannot even tie with them. All other
rows are candidates. In the same way, the k-th best of some scores in float64 bounds the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.linalg import vector_norm
from torch.nn.functional import pad

from rag_demo.threads import threads, worth
from rag_demo.vectors import Mask, Pairs, Scores, Take, Vectors, exact_scores, rounding

FEW_QUERIES = 4
"""Up to so many queries, a CPU multiplies float32 vectors as fast as rounded ones."""
_READ_AS_FAST = 8  # queries
_SCORES_PER_PAIR = 64  # So much more memory does a candidate take, until it is scored again.
_SLACK = 1e-6  # Lengths are 1 within 2**-22, and bounds are computed in float32.
_LEAST = -2.0  # below every score
_AT_ONCE = 1 << 13  # rows that are turned into a wider dtype at once
_UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # the unit roundoff of each dtype
# From torch 2.8 on, products of narrower vectors can be float32.
_HAS_WIDE_PRODUCTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
# The products of rows and a vector, in one thread; numpy has it from 2.0 on.
_dot: Callable[[Any, Any], Any] = getattr(np, "vecdot", partial(np.einsum, "ij,j->i"))


class Products(NamedTuple):
    """How to multiply, and how exact that is.

    Attributes:
        multiply: Takes queries (b, d) and vectors (n, d), and returns scores (b, n).
        dtype: The dtype of the queries.
        relative: A bound of the error, relative to the score.
        absolute: Another part of it, beside that of float32 sums.
    """

    multiply: Callable[[Any, Any], Any]
    dtype: Any = torch.float32
    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True)
class Source:
    """Rows to search, and how.

    Attributes:
        device: The device of the vectors.
        products: How to multiply the vectors, see `products_on`.
        chunks: Takes a number, and yields consecutive vectors, at most so many at once.
        take: Returns the true vectors of rows: shape (n, d), float32, in host memory.
        allowed: Which rows are allowed: shape (n,); None for all.
        error: The largest distance of a row from the true vector.
        resident: All true vectors, float32, if they are on a device that computes in float64.
        scratch_bytes: Scores and candidates fit into so many bytes; None for any number.
    """

    device: Any
    products: Products
    chunks: Callable[[int], Iterable[Any]]
    take: Take
    allowed: Mask | None = None
    error: float = 0.0
    resident: Any = None
    scratch_bytes: int | None = None


def search(source: Source, queries: Vectors, top_k: int) -> Pairs:
    """Find the best rows of each query.

    Args:
        source: The rows.
        queries: Shape (b, d), float32, each of length 1.
        top_k: How many rows, at most as many as are allowed.

    Returns:
        All pairs that score at least as much as the k-th best one of their query, with their exact
        scores.
    """
    # Scores, in a CPU's caches; and rows of a block, because a CPU foresees few streams.
    at_once, most_rows = (1 << 23, 16) if source.device.type == "cpu" else (1 << 28, 128)
    if source.scratch_bytes is not None:
        at_once = min(at_once, max(1 << 14, source.scratch_bytes // 16))
    with torch.inference_mode(), threads(1) as all_threads:
        products = source.products
        asked = torch.from_numpy(queries).to(source.device)
        factors = asked.to(products.dtype)
        rounded = vector_norm(asked - factors.float(), dim=1, keepdim=True)  # |q - q'|
        error = source.error * (1 + rounded) + rounded + products.absolute + _SLACK
        error += rounding(queries.shape[1]) / 2 * (1 + source.error) * (1 + rounded)

        def lower(scores: Any) -> Any:
            return scores - error - products.relative * scores.abs()

        best = asked.new_full((len(queries), top_k), _LEAST)  # the largest maxima of blocks
        bar = asked.new_full((len(queries), 1), _LEAST)  # of the true scores
        found: list[tuple[Any, Any, Any]] = []  # candidates: query, row and score
        end, count, most = 0, 0, max(at_once // _SCORES_PER_PAIR, 2 * best.numel())
        # Fewer than one row in so many are gathered: a product of all rows takes longer.
        few_of, numbers = 8 if len(queries) <= FEW_QUERIES else 3, len(queries)
        if source.allowed is not None:
            share = np.count_nonzero(source.allowed) / len(source.allowed)
            if few_of * share < 1:  # Gathered rows take no more memory than scores.
                numbers = max(numbers, int(queries.shape[1] * share))
        for vectors in source.chunks(max(1, at_once // numbers)):
            allowed, chosen, start, end = None, None, end, end + len(vectors)
            if source.allowed is not None:
                mask = source.allowed[start:end]
                if few_of * np.count_nonzero(mask) < len(mask):
                    chosen = torch.from_numpy(np.flatnonzero(mask)).to(source.device)
                    vectors = vectors.index_select(0, chosen)  # faster than an index
                else:
                    allowed = torch.from_numpy(mask).to(source.device)
            if not len(vectors):
                continue
            root = 1 << (len(vectors) // (8 * top_k)).bit_length() // 2  # about the square root
            block = min(root, most_rows)
            # A single query reads as much memory as several, and that takes the time.
            work = max(len(queries), _READ_AS_FAST) * vectors.numel()
            with threads(worth(work, all_threads)):
                scores = products.multiply(factors, vectors)
                if allowed is not None:
                    # A tenth of the time of `masked_fill_`.
                    scores += torch.where(allowed, 0.0, -torch.inf).to(scores.dtype)
                if missing := -len(vectors) % block:
                    scores = pad(scores, (0, missing), value=-torch.inf)
                blocks = scores.unflatten(1, (block, -1))
                maxima = blocks.amax(1).float()
                best = torch.cat([best, maxima], 1).topk(top_k, dim=1).values
            least = lower(torch.maximum(lower(best[:, -1:]), bar))
            query, place = (maxima >= least).nonzero(as_tuple=True)
            inside = blocks[query, :, place].float()
            near, offset = (inside >= least[query]).nonzero(as_tuple=True)
            row = offset * maxima.shape[1] + place[near]
            row = start + (row if chosen is None else chosen[row])
            found.append((query[near], row, inside[near, offset]))
            count += len(row)
            if count > most:
                pairs, bars = _scored_again(source, asked, found, least, top_k)
                bar = torch.from_numpy(bars.astype(np.float32)).to(asked.device)[:, None]
                query, row = (torch.from_numpy(each).to(asked.device) for each in pairs[:2])
                found, count = [(query, row, asked.new_full((len(row),), torch.inf))], len(row)
                most = max(most, 2 * count)  # With many ties, the time must stay linear.
        return _scored_again(source, asked, found, least, top_k)[0]


def _scored_again(
    source: Source, queries: Any, found: Sequence[Any], least: Any, top_k: int
) -> tuple[Pairs, Scores]:
    """Score candidates in float64.

    Args:
        source: The rows.
        queries: Shape (b, d), on the device.
        found: Candidates: the number of the query, the row and the score.
        least: The lowest score that can be among the best of each query: shape (b, 1).
        top_k: How many rows.

    Returns:
        The pairs that are at least as good as the k-th best of their query, and the scores of the
        k-th best: shape (b,), float64.
    """
    its_query, its_row, score = (torch.cat(parts) for parts in zip(*found, strict=True))
    is_near = score >= least[its_query, 0]
    its_query, its_row = its_query[is_near], its_row[is_near]
    query, row = its_query.cpu().numpy(), its_row.cpu().numpy()
    if source.resident is None:
        exact = exact_scores(source.take, queries.cpu().numpy(), query, row)
    else:
        slices = (slice(n, n + _AT_ONCE) for n in range(0, len(row), _AT_ONCE))
        pairs = ((queries[its_query[some]], source.resident[its_row[some]]) for some in slices)
        exact = torch.cat([_summed(q.double() * v) for q, v in pairs]).cpu().numpy()
    order = np.lexsort((-exact, query))
    query, row, exact = query[order], row[order], exact[order]
    starts = np.searchsorted(query, np.arange(len(queries) + 1))
    last = starts[:-1] + top_k - 1
    bars, has_all = np.full(len(queries), _LEAST), last < starts[1:]
    bars[has_all] = exact[last[has_all]]
    kept = exact >= bars[query]
    return Pairs(query[kept], row[kept], exact[kept]), bars


def _summed(products: Any) -> Any:
    """Add the columns, shape (n, d), always in the same order.

    The order of additions in torch's sum depends on the shape. Here equal vectors have equal
    scores in any batch, to the last bit.
    """
    while (count := products.shape[1]) > 1:
        half = count // 2
        products[:, :half] += products[:, count - half :]
        products = products[:, : count - half]
    return products[:, 0]


def products_on(device: Any, dtype: Any) -> Products:
    """Return the fastest way to multiply vectors of a dtype on a device."""
    unit = _UNITS.get(dtype, 0.0)
    if device.type == "cpu":
        if dtype == torch.bfloat16 and bfloat16_units():
            return Products(_multiply, dtype, relative=unit * 1.01)
        return Products(_multiply_on_cpu, absolute=_allowed_error())
    if dtype == torch.float32:
        return Products(_multiply, absolute=_allowed_error())
    if device.type == "cuda" and _HAS_WIDE_PRODUCTS:
        return Products(lambda q, v: torch.mm(q, v.T, out_dtype=torch.float32), dtype)
    # The library may add up to 16 partial sums in the narrow dtype.
    return Products(_multiply, dtype, relative=unit * 1.01, absolute=16 * unit)


def _multiply(queries: Any, vectors: Any) -> Any:
    return torch.mm(queries, vectors.T)


def _multiply_on_cpu(queries: Any, vectors: Any) -> Any:
    """Multiply in float32, in the way that is fastest for so many queries."""
    if vectors.dtype != torch.float32:  # Products of narrower dtypes are slow.
        parts = (part.float() for part in vectors.split(_AT_ONCE))
        return torch.cat([_multiply_on_cpu(queries, part) for part in parts], 1)
    if 1 < len(queries) <= FEW_QUERIES:
        return torch.mm(vectors, queries.T).T.contiguous()
    if len(queries) == 1 and torch.get_num_threads() <= 2:
        return torch.from_numpy(_dot(vectors.numpy(), queries[0].numpy()))[None]
    return torch.from_numpy(queries.numpy() @ vectors.numpy().T)


def bfloat16_units() -> list[str]:
    """Return which units for products of bfloat16 this processor has: "amx", "avx512" or both."""
    found: Any = getattr(torch.cpu, "get_capabilities", dict)()  # from torch 2.11 on
    return [unit for unit in ("amx", "avx512") if found.get(f"{unit}_bf16")]


def _allowed_error() -> float:
    """Bound the additional error of float32 products that the program has allowed torch.

    It may let torch round the factors to TF32 or bfloat16 first, which has 8 bits.
    """
    try:
        is_exact = torch.get_float32_matmul_precision() == "highest"
        is_exact = is_exact and not torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # torch does not tell, if the program has set `fp32_precision`.
        is_exact = False
    return 0.0 if is_exact else 2.0**-7 + 2.0**-16
