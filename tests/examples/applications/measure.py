"""What a program of this folder measures of itself, without the product's own reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def anonymous_mb() -> float:
    """Return the memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def settle() -> None:
    """Free one block of 30 MB: glibc then keeps freed blocks below that, as after a real load."""
    import torch

    block = torch.ones(30 << 18)
    del block


class Storages:
    """Weak references to the storages of some tensors."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        self._sizes = {
            StorageWeakRef(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors
        }

    def alive_mb(self) -> float:
        """Return how much of their memory still exists."""
        return sum(size for ref, size in self._sizes.items() if not ref.expired()) / 1e6


def tell(**facts: Any) -> None:
    """Print a line of measurements for the test."""
    print(json.dumps(facts), flush=True, file=sys.__stdout__)
