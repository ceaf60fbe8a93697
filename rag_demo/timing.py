"""How long something takes, for a choice between ways to do it."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["least_seconds"]


def least_seconds(action: Callable[[], object], tries: int) -> float:
    """Return the seconds that an action took in the quickest of its tries."""
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return min(times)
