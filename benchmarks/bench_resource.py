"""What a `Resource` costs beside a plain object, and whether a million leave anything behind."""

from __future__ import annotations

import gc
import statistics
import weakref
from collections.abc import Callable

from benchmarks.results_file import write
from torch_utils import Resource, measuring, memory_snapshot

COUNT = 1_000_000


class Plain:
    def close(self) -> None:
        pass


class Finalized:
    """The peer: the standard library's own way of being closed at exit."""

    def __init__(self) -> None:
        self.finalizer = weakref.finalize(self, int)

    def close(self) -> None:
        self.finalizer()


class Managed(Resource):
    def _release(self) -> None:
        pass


def microseconds(make: Callable[[], object], rounds: int = 5, count: int = 50_000) -> float:
    """Create and close objects; the median of the rounds, for each."""
    times = []
    for _ in range(rounds):
        with measuring("cpu") as taken:
            for _ in range(count):
                make().close()  # type: ignore[attr-defined]
        times.append(taken.median_s / count * 1e6)
    return statistics.median(times)


def main() -> None:
    cost = {kind.__name__: microseconds(kind) for kind in (Plain, Finalized, Managed)}
    for name, value in cost.items():
        print(f"{name:12} {value:6.2f} microseconds to create and close")
    Managed().close()
    gc.collect()
    before = memory_snapshot()
    for _ in range(COUNT):
        Managed().close()
    grown = (memory_snapshot() - before).host.rss_bytes
    print(f"{COUNT:,} created and closed: {grown:,} bytes more")
    kept = [Managed() for _ in range(COUNT // 10)]
    with measuring("cpu") as taken:
        for resource in kept:
            resource.close()
    each = taken.median_s / len(kept) * 1e6
    print(f"closing one of {len(kept):,} that are open: {each:.2f} microseconds")
    write(
        "resource",
        {
            "microseconds": cost,
            "count": COUNT,
            "grown_bytes": grown,
            "close_among_many_us": each,
        },
    )


if __name__ == "__main__":
    main()
