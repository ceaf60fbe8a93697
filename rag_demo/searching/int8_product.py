"""The product of two int8 matrices, where this processor and this torch do it right and fast.

``torch._int_mm`` is private; so it is tried on numbers whose product is known, and timed beside
the float32 product that it would replace, once in a process.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from torch_utils import measure

__all__ = ["Product", "int8_product"]

_ROWS, _COLUMNS = 2048, 33
_TRIES = 5


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
    generator = torch.Generator().manual_seed(0)
    left, right = (
        torch.randint(-127, 128, (count, dimension), dtype=torch.int8, generator=generator)
        for count in (_ROWS, _COLUMNS)
    )
    left_float, right_float = left.float(), right.float()
    expected = left_float @ right_float.T  # Exact in float32 while below 2**24: d < 1040.
    if dimension >= 1 << 10:
        expected = left.int() @ right.T.int()
    try:
        for rows, columns in ((_ROWS, _COLUMNS), (_ROWS, 1), (3, 2), (1, 1)):
            result = torch.zeros(rows, columns, dtype=torch.int32)
            product(left[:rows], right[:columns].T, out=result)
            if not torch.equal(result.to(expected.dtype), expected[:rows, :columns]):
                return None
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    room = torch.empty(_ROWS, _COLUMNS, dtype=torch.int32)
    of_int8, of_floats = (
        measure(way, warmup=0, repeat=_TRIES, device="cpu")
        for way in (
            lambda: product(left, right.T, out=room),
            lambda: left_float @ right_float.T,
        )
    )
    # The quickest of the tries: what else the processor did meanwhile is no part of it.
    return product if min(of_int8.host_s) < min(of_floats.host_s) else None
