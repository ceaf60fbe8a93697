"""How many threads torch's operations on a CPU use: those that pay.

Each operation with several threads waits for all of them. On a busy machine that is some
milliseconds, even for a matrix of a few kilobytes. The number is a setting of OpenMP for the
calling thread alone, which `torch.set_num_threads` also changes for threads that come later. It
does not reach MKL in a program that has called that, nor OpenBLAS, by which NumPy multiplies
float32 on processors without units for bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch  # Its OpenMP is loaded before it is looked for.

_WORTH = 1 << 29  # multiplications, which take a thread some milliseconds


@contextlib.contextmanager
def threads(count: int) -> Iterator[int]:
    """Let operations of this thread use so many threads in a block; yield how many it had."""
    before = torch.get_num_threads()
    pools = [(each, each.get_num_threads()) for each in _pools()] if count != before else []
    try:
        for pool, _ in pools:
            pool.set_num_threads(count)
        yield before
    finally:
        for pool, usual in pools:
            pool.set_num_threads(usual)


def worth(multiplications: int, count: int) -> int:
    """Return the number of threads for so many multiplications: ``count`` or 1."""
    return count if multiplications >= _WORTH else 1


@cache
def _pools() -> list[Any]:
    from threadpoolctl import ThreadpoolController

    found = ThreadpoolController().lib_controllers
    return [each for each in found if each.user_api == "openmp"]
