"""The product of two int8 matrices, where this processor and this torch do it right and fast.

torch has no public one. Both operators that are tried here are oneDNN's, by ways that may change:
so each is tried on numbers whose product is known, and timed beside the float32 product that it
would replace, once in a process.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Int8Product", "int8_product"]

_ROWS, _FEW_ROWS, _COLUMNS = 2048, 128, 33
_TRIES = 5
# A thread that waits for the other one on a busy machine takes no time of its own; elsewhere
# that clock is too coarse.
_clock = time.thread_time if sys.platform == "linux" else time.perf_counter
_CLEARLY = 4  # times slower: no more tries are needed, each of which would take 50 ms

Multiply = Callable[[Any, Callable[[], Any]], Any]


@dataclass(frozen=True)
class Int8Product:
    """A way to multiply rows with queries.

    Attributes:
        by: Takes queries, int8, shape (b, d), and returns a function of rows, int8, shape
            (n, d), and of what gives room for int32 of shape (n, b), which it may use. That
            returns the products: whole numbers, as int32 or float32, shape (n, b).
        most: The largest number of a query for which it is right.
        suits_one: Whether it is fast for a single query too.
    """

    by: Callable[[Any], Multiply]
    most: int
    suits_one: bool


def int8_product(torch: Any, dimension: int, queries: int) -> Int8Product | None:
    """Return a way to multiply int8 rows with so many queries; or None.

    None where there is no such operator, where its results are wrong (torch 2.13 on x86-64 for
    d = 1), or where it is slower than the float32 product.
    """
    product = _fastest(torch, dimension)
    return None if product is None or (queries == 1 and not product.suits_one) else product


@functools.lru_cache(maxsize=32)
def _fastest(torch: Any, dimension: int) -> Int8Product | None:
    ways = (
        # Of AVX-512 VNNI and AMX; without these it takes thirty times as long as float32.
        Int8Product(lambda queries: _by_int_mm(torch, queries), 127, suits_one=True),
        # Of AVX2 too, where sums of two products have 16 bits: so queries have 7.
        Int8Product(lambda queries: _by_linear(torch, queries), 63, suits_one=False),
    )
    return next((way for way in ways if _is_good(torch, way, dimension)), None)


def _by_int_mm(torch: Any, queries: Any) -> Multiply:
    multiply, transposed = torch._int_mm, queries.T
    return lambda rows, room: multiply(rows, transposed, out=room())


def _by_linear(torch: Any, queries: Any) -> Multiply:
    """Let queries be the weights of a quantized linear layer, all of whose scales are 1."""
    operators, count = torch.ops.onednn, len(queries)
    packed = operators.qlinear_prepack(queries, None)
    ones, zeros = torch.ones(count), torch.zeros(count, dtype=torch.int64)
    layer: tuple[Any, ...] = (packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], "")
    return lambda rows, room: operators.qlinear_pointwise(rows, 1.0, 0, *layer)


def _is_good(torch: Any, way: Int8Product, dimension: int) -> bool:
    try:
        few = _numbers(torch, _FEW_ROWS, dimension, 127)
        right = _numbers(torch, _COLUMNS, dimension, way.most)
        if not all(
            _is_right(torch, way, few[:rows], right[:columns])
            for rows, columns in ((_FEW_ROWS, _COLUMNS), (_FEW_ROWS, 1), (3, 2), (1, 1))
        ):
            return False
        if _speed(torch, way, few, right) < 1 / _CLEARLY:
            return False
        many = _numbers(torch, _ROWS, dimension, 127)
        return _is_right(torch, way, many, right) and _speed(torch, way, many, right) > 1
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False


def _numbers(torch: Any, rows: int, dimension: int, most: int) -> Any:
    """Make random numbers, behind a row of the largest ones: a sum may not be cut off."""
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, dimension)
    numbers = torch.randint(-most, most + 1, shape, dtype=torch.int8, generator=generator)
    numbers[0] = most
    numbers[1::2, ::2] = -most
    return numbers


def _multiply(torch: Any, way: Int8Product, left: Any, right: Any) -> Callable[[], Any]:
    room = torch.zeros(len(left), len(right), dtype=torch.int32)
    multiply = way.by(right)
    return lambda: multiply(left, lambda: room)


def _is_right(torch: Any, way: Int8Product, left: Any, right: Any) -> bool:
    if left.shape[1] < 1 << 10:
        expected = left.float() @ right.float().T  # Exact in float32 while below 2**24.
    else:
        expected = left.int() @ right.T.int()
    result = _multiply(torch, way, left, right)()
    return bool(torch.equal(result.to(expected.dtype), expected))


def _speed(torch: Any, way: Int8Product, left: Any, right: Any) -> float:
    """How many times as fast as the product of floats it is."""
    left_float, right_float = left.float(), right.float()
    of_int8 = _seconds(_multiply(torch, way, left, right))
    return _seconds(lambda: left_float @ right_float.T) / of_int8


def _seconds(way: Callable[[], object]) -> float:
    """The quickest of some tries; what else the processor did meanwhile is no part of it."""
    times = []
    for _ in range(_TRIES):
        start = _clock()
        way()
        times.append(_clock() - start)
    return max(min(times), 1e-9)
