"""Exact search on any device: one pass, a proven bound, and float64 for the few candidates.

`search` multiplies all rows with the queries, in the fastest precision of the device, and keeps the
best candidates of each query. It scores them in float64 and proves that every other row is worse.
If it cannot prove this for a query, it repeats the pass for that query with more candidates.

Why the answers are exact. Let v be a row and q a query, both float32 of length 1, and let v' and q'
be their copies in the precision of the pass. The true score is <v, q>. For the computed score s:

1. The difference of the products is ``<v - v', q'> + <v, q - q'>``. By the inequality of Cauchy
   and Schwarz it is at most ``|v - v'| |q'| + |v| |q - q'|``. The distances are measured when the
   copies are made; the largest ``|v - v'|`` counts for all rows.
2. Summing d products with unit roundoff u errs by at most ``d u / (1 - d u)`` times the sum of
   their magnitudes, in any order (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
   That sum is at most ``|v'| |q'|``, by the same inequality. `rounding` allows twice as much.
3. Storing a score in a narrower dtype changes it by at most its unit roundoff times the score.

So the true score lies between ``lower(s) = s - e - r |s|`` and ``upper(s) = s + e + r |s|``, where
e is the sum of 1 and 2, and r that of 3. Both grow with s. At least k rows have a true score of
``lower`` of the k-th best s or more. A row that was not kept has at most the s of the last one that
was. If its ``upper`` is below that, it is worse than the k-th best row, and cannot even tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from rag_demo.exact_search.scores import Pairs, Scores, exact_scores
from rag_demo.vectors import Rows, Vectors, rounding

FEW_ROWS = 1 << 15
"""Up to so many rows are multiplied with a single query without further threads."""
FEW_QUERIES = 8
"""Up to so many queries, a CPU multiplies float32 vectors as fast as rounded ones."""
_MASKED = -4.0  # below every score, and finite
_SLACK = 1e-6  # Lengths are 1 within 2**-22, and bounds are computed in float32.
_UNITS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # the unit roundoff of each dtype
# From torch 2.8 on, products of narrower vectors can be float32.
_HAS_WIDE_PRODUCTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
# The products of rows and a vector, in one thread; numpy has it from 2.0 on.
_dot: Callable[[Any, Any], Any] = getattr(np, "vecdot", partial(np.einsum, "ij,j->i"))
_MORE = 8  # times as many candidates, where fewer prove nothing
_FEWEST_ROWS = 1 << 11  # that are multiplied at once, if there is room for few scores
_WIDENED = 1 << 13  # rows that are turned into float32 at once


@dataclass(frozen=True)
class Source:
    """Rows to search.

    Attributes:
        device: The device of the vectors.
        dtype: Their dtype: float32, float16 or bfloat16.
        parts: Each takes a number, and yields consecutive vectors, at most so many at once.
        take: Returns the true vectors of rows: shape (n, d), float32, in host memory.
        available: How many rows are allowed.
        allowed: Which rows are allowed: shape (n,), on the device; None for all.
        error: The largest distance of a row from the true vector.
        resident: All true vectors, float32, if they are on the device.
    """

    device: Any
    dtype: Any
    parts: Sequence[Callable[[int], Iterable[Any]]]
    take: Callable[[Rows], Vectors]
    available: int
    allowed: Any = None
    error: float = 0.0
    resident: Any = None

    def chunks(self, step: int) -> Iterator[tuple[int, Any, Any]]:
        """Yield the first row, some vectors, and which of them are allowed."""
        start = 0
        for vectors in chain.from_iterable(part(step) for part in self.parts):
            stop = start + len(vectors)
            yield start, vectors, None if self.allowed is None else self.allowed[start:stop]
            start = stop


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
class Profile:
    """All that differs between devices.

    Attributes:
        products: Tells how to multiply vectors of a dtype on a device.
        scores: How many scores are computed at once.
        pairs: How many candidates there are at once, of all queries together.
        is_cpu: Whether the rows of a block are spread over the chunk, and whether to look how many
            blocks can matter. Both are faster on a CPU; a GPU would have to wait for the second.
        exact_on_device: Whether candidates are scored there in float64.
        is_pinned: Whether rows from a file pass through pinned memory.
    """

    products: Callable[[Any, Any], Products]
    scores: int
    pairs: int
    is_cpu: bool = False
    exact_on_device: bool = False
    is_pinned: bool = False

    def within(self, scratch_bytes: int | None) -> Profile:
        """Return a profile whose scores and candidates fit into so many bytes."""
        if scratch_bytes is None:
            return self
        scores, pairs = (max(1 << 14, scratch_bytes // part) for part in (16, 128))
        return replace(self, scores=min(self.scores, scores), pairs=min(self.pairs, pairs))


def search(source: Source, queries: Vectors, top_k: int, profile: Profile) -> Pairs:
    """Find the best rows of each query.

    Args:
        source: The rows.
        queries: Shape (b, d), float32, each of length 1.
        top_k: How many rows, at most as many as are available.
        profile: The profile of the device.

    Returns:
        The pairs with their exact scores. They include every row that scores at least as much as
        the k-th best, and a few others.
    """
    kept = top_k + 8 if source.dtype == torch.float32 else 2 * top_k + 44
    pending: Rows = np.arange(len(queries))
    found: list[list[Any]] = []
    with torch.inference_mode():
        while len(pending):
            kept = min(kept, source.available)
            at_once = max(1, min(profile.pairs // kept, profile.scores // _FEWEST_ROWS))
            unproven = []
            for start in range(0, len(pending), at_once):
                numbers = pending[start : start + at_once]
                pairs, is_proven = _pass(source, queries[numbers], top_k, kept, profile)
                chosen = is_proven[pairs[0]]
                found.append([part[chosen] for part in (numbers[pairs[0]], *pairs[1:])])
                unproven.append(numbers[~is_proven])
            pending, kept = np.concatenate(unproven), _MORE * kept
    query, row, scores = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(query, kind="stable")
    return Pairs(query[order], row[order], scores[order])


def _pass(
    source: Source, queries: Vectors, top_k: int, kept: int, profile: Profile
) -> tuple[tuple[Rows, Rows, Scores], Any]:
    """Multiply all rows with the queries, keep so many candidates of each, and score them exactly.

    On a GPU nothing waits for the device before the candidates are copied from it.

    Returns:
        The candidates that may be among the best, and which queries have no others: shape (b,).
    """
    products = profile.products(source.dtype, source.device)
    asked = torch.from_numpy(queries).to(source.device)
    factors = asked.to(products.dtype)
    best: Any = None
    rows: Any = None
    for start, vectors, allowed in source.chunks(max(1, profile.scores // len(asked))):
        scores = products.multiply(factors, vectors)
        if allowed is not None:
            scores.masked_fill_(~allowed, _MASKED)
        is_full = best is not None and best.shape[1] == kept
        more, more_rows = _largest(scores, kept, best[:, -1:] if is_full else None, profile)
        if best is None:
            best, rows = more, more_rows
            continue
        best, places = _topk(torch.cat([best, more], 1), kept)
        rows = torch.cat([rows, more_rows + start], 1).gather(1, places)
    rounded: Any = 0.0  # the distance |q - q'|
    if products.dtype != torch.float32:
        rounded = (asked - factors.float()).norm(dim=1, keepdim=True)
    error = source.error * (1 + rounded) + rounded + products.absolute + _SLACK
    error += rounding(queries.shape[1]) / 2 * (1 + source.error) * (1 + rounded)
    if products.relative:
        error = error + products.relative * best.abs()
    lower, upper = best - error, best + error
    least = lower[:, top_k - 1 : top_k]
    is_near = (upper >= least) & (best > _MASKED / 2)
    is_proven = upper[:, -1] < least[:, 0]
    exact = None
    if source.resident is not None:
        exact = _summed(asked.double()[:, None] * source.resident[rows])
        exact = exact.cpu().numpy()
    query, place = (in_host := is_near.cpu().numpy()).nonzero()
    row = rows.cpu().numpy()[in_host]
    if exact is not None:
        scores_of = exact[query, place]
    elif profile.exact_on_device:
        products_of = asked[torch.from_numpy(query).to(source.device)].double()
        products_of *= torch.from_numpy(source.take(row)).to(source.device)
        scores_of = _summed(products_of).cpu().numpy()
    else:
        scores_of = exact_scores(source.take, queries, query, row)
    proven = is_proven.cpu().numpy()
    return (query, row, scores_of), proven | (kept == source.available)


def _summed(products: Any) -> Any:
    """Add the columns, shape (..., d), always in the same order.

    The order of additions in torch's sum depends on the shape. Here equal vectors have equal
    scores in any batch, to the last bit.
    """
    while (count := products.shape[-1]) > 1:
        half = count // 2
        products[..., :half] += products[..., count - half :]
        products = products[..., : count - half]
    return products[..., 0]


def _largest(scores: Any, count: int, least: Any, profile: Profile) -> tuple[Any, Any]:
    """Find the largest scores of each query, and their rows.

    The largest scores lie in the blocks with the largest maxima, so most scores are only compared
    with those of their block.

    Args:
        scores: Shape (b, n).
        count: How many to find.
        least: Scores that are known not to be among the largest, shape (b, 1), or None.
        profile: The profile of the device.

    Returns:
        The scores, float32, and the rows: shape (b, min(count, n)) each.
    """
    width = scores.shape[1]
    block = 1 << (width // count).bit_length() // 2  # about the square root
    blocks = width // block
    if block == 1 or blocks <= count:
        return _topk(scores.float(), count)
    whole = blocks * block
    if profile.is_cpu:
        parts = scores[:, :whole].view(-1, block, blocks)
    else:
        parts = scores[:, :whole].view(-1, blocks, block).transpose(1, 2)
    maxima, most = parts.amax(1).float(), count
    if least is not None and profile.is_cpu:
        most = max(1, min(count, int((maxima > least).sum(1).max())))
    _, chosen = _topk(maxima, most)
    query = torch.arange(len(scores), device=scores.device)[:, None]
    inside = parts[query, :, chosen].flatten(1)
    found, place = _topk(torch.cat([inside, scores[:, whole:]], 1).float(), count)
    offset, within = place // block, place % block
    of_block = chosen.gather(1, offset.clamp_(max=most - 1))
    row = of_block * parts.stride(2) + within * parts.stride(1)
    return found, torch.where(place < inside.shape[1], row, place - inside.shape[1] + whole)


def _topk(scores: Any, count: int) -> tuple[Any, Any]:
    values, places = scores.topk(min(count, scores.shape[1]), dim=1)
    return values, places


def _products_on_cpu(dtype: Any, device: Any) -> Products:
    if dtype == torch.bfloat16 and has_fast_bfloat16():
        return Products(lambda q, v: torch.mm(q, v.T), dtype, relative=_UNITS[dtype] * 1.01)
    return Products(_multiply_on_cpu, absolute=_allowed_error(device))


def _multiply_on_cpu(queries: Any, vectors: Any) -> Any:
    """Multiply in float32, in the way that is fastest for so many queries."""
    if vectors.dtype != torch.float32:  # Products of narrower dtypes are slow.
        parts = (part.float() for part in vectors.split(_WIDENED))
        return torch.cat([_multiply_on_cpu(queries, part) for part in parts], 1)
    if len(queries) > FEW_QUERIES:
        return torch.from_numpy(queries.numpy() @ vectors.numpy().T)
    if len(queries) == 1 and (len(vectors) <= FEW_ROWS or torch.get_num_threads() == 1):
        # Threads would save nothing, and on a busy machine they take ten times as long.
        return torch.from_numpy(_dot(vectors.numpy(), queries[0].numpy()))[None]
    several = queries if len(queries) > 1 else queries.repeat(2, 1)  # One takes twice as long.
    return torch.mm(vectors, several.T).T[: len(queries)].contiguous()


def _products_on_gpu(dtype: Any, device: Any) -> Products:
    if dtype == torch.float32:
        return Products(lambda q, v: torch.mm(q, v.T), absolute=_allowed_error(device))
    if device.type == "cuda" and _HAS_WIDE_PRODUCTS:
        return Products(lambda q, v: torch.mm(q, v.T, out_dtype=torch.float32), dtype)
    # The library may add up to 16 partial sums in the narrow dtype.
    unit = _UNITS[dtype]
    return Products(lambda q, v: torch.mm(q, v.T), dtype, relative=unit * 1.01, absolute=16 * unit)


@cache
def has_fast_bfloat16() -> bool:
    """Tell whether this processor has instructions for products of bfloat16: AMX or AVX-512."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    tests = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")  # before torch 2.11
    return any(capabilities.get(name, False) for name in ("amx_bf16", "avx512_bf16")) or any(
        getattr(torch.cpu, test, bool)() for test in tests
    )


def _allowed_error(device: Any) -> float:
    """Bound the additional error of float32 products that the program has allowed torch.

    It may let torch round the factors to TF32 or bfloat16 first, which has 8 bits.
    """
    is_exact = torch.get_float32_matmul_precision() == "highest"
    return 0.0 if is_exact and not torch.backends.cuda.matmul.allow_tf32 else 2.0**-7 + 2.0**-16


CPU = Profile(_products_on_cpu, scores=1 << 23, pairs=1 << 18, is_cpu=True)
GPU = Profile(_products_on_gpu, scores=1 << 28, pairs=1 << 16, exact_on_device=True, is_pinned=True)


def profile_of(device: str) -> Profile:
    """Return the profile of a device."""
    kind = torch.device(device).type
    # mps has no float64, and pins nothing.
    is_cuda = kind == "cuda"
    return CPU if kind == "cpu" else replace(GPU, exact_on_device=is_cuda, is_pinned=is_cuda)
