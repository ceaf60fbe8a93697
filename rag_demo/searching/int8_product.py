"""The product of two int8 matrices, where this processor and this torch do it right and fast.

``torch._int_mm`` is private; so it is tried on numbers whose product is known, and timed beside
the float32 product that it would replace, once in a process.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Product", "int8_product"]

_ROWS, _FEW_ROWS, _COLUMNS = 2048, 128, 33
_TRIES = 5
# A thread that waits for the other one on a busy machine takes no time of its own; elsewhere
# that clock is too coarse.
_clock = time.thread_time if sys.platform == "linux" else time.perf_counter
_CLEARLY = 4  # times slower: no more tries are needed, each of which would take 50 ms


class Product(Protocol):
    """A function of (n, d) and (d, b), both int8, that gives (n, b), int32."""

    def __call__(self, left: Any, right: Any, *, out: Any) -> object:
        """Multiply into ``out``."""


@functools.lru_cache(maxsize=32)
def int8_product(torch: Any, dimension: int) -> Product | None:
    """Return the product of two int8 matrices; or None.

    None where there is no such operator, where its results are wrong (torch 2.13 on x86-64 for
    d = 1), or where it is slower than the float32 product.
    """
    product: Product | None = getattr(torch, "_int_mm", None)
    if product is None:
        return None
    try:
        few, right = _numbers(torch, _FEW_ROWS, dimension), _numbers(torch, _COLUMNS, dimension)
        if not all(
            _is_right(torch, product, few[:rows], right[:columns])
            for rows, columns in ((_FEW_ROWS, _COLUMNS), (_FEW_ROWS, 1), (3, 2), (1, 1))
        ):
            return None
        if _speed(torch, product, few, right) < 1 / _CLEARLY:
            return None
        many = _numbers(torch, _ROWS, dimension)
        if not _is_right(torch, product, many, right):
            return None
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    return product if _speed(torch, product, many, right) > 1 else None


def _numbers(torch: Any, rows: int, dimension: int) -> Any:
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, dimension)
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)


def _is_right(torch: Any, product: Product, left: Any, right: Any) -> bool:
    if left.shape[1] < 1 << 10:
        expected = left.float() @ right.float().T  # Exact in float32 while below 2**24.
    else:
        expected = left.int() @ right.T.int()
    result = torch.zeros(len(left), len(right), dtype=torch.int32)
    product(left, right.T, out=result)
    return bool(torch.equal(result.to(expected.dtype), expected))


def _speed(torch: Any, product: Product, left: Any, right: Any) -> float:
    """How many times as fast as the product of floats it is."""
    room = torch.empty(len(left), len(right), dtype=torch.int32)
    left_float, right_float = left.float(), right.float()
    of_int8 = _seconds(lambda: product(left, right.T, out=room))
    return _seconds(lambda: left_float @ right_float.T) / of_int8


def _seconds(way: Callable[[], object]) -> float:
    """The quickest of some tries; what else the processor did meanwhile is no part of it."""
    times = []
    for _ in range(_TRIES):
        start = _clock()
        way()
        times.append(_clock() - start)
    return max(min(times), 1e-9)
