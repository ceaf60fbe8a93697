"""Measure what a census and `no_growth` cost beside a full garbage collection."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results_file import write


class Other:
    """One of the other objects of a program."""


def milliseconds(function: Callable[[], object], rounds: int = 9) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def blocks() -> list[dict[str, Any]]:
    """Return the medians for programs of two sizes, in turn in one process."""
    import torch

    from torch_utils import live_memory, no_growth

    def block() -> None:
        with no_growth():
            pass

    kept = [torch.nn.Linear(50, 50) for _ in range(100)]
    others: list[Other] = []
    rows = []
    for count in (170_000, 600_000):
        while len(gc.get_objects()) < count:
            for _ in range(20_000):
                others.append(Other())
                others[-1].note = [others[-1]]  # type: ignore[attr-defined]
        rows.append(
            {
                "objects": len(gc.get_objects()),
                "gc_ms": milliseconds(gc.collect),
                "block_ms": milliseconds(block),
                "census_ms": milliseconds(live_memory),
                "table_ms": milliseconds(lambda: str(live_memory(least_bytes=1))),
            }
        )
    del kept
    return rows


SUITE = """
import pytest, torch
MODEL = torch.nn.Linear(20, 20)
@pytest.mark.parametrize("number", range(300))
def test_step(number):
    MODEL(torch.rand(4, 20)).sum().backward()
"""


def suite() -> dict[str, float]:
    """Return the seconds of a suite of 300 tests with the option and without, in turn."""
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_suite.py").write_text(SUITE)
        for _ in range(3):
            for way, options in (("off", ()), ("on", ("--no-growth",))):
                command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
                started = time.perf_counter()
                subprocess.run([*command, *options, folder], check=True, capture_output=True)
                seconds[way].append(time.perf_counter() - started)
    return {way: statistics.median(times) for way, times in seconds.items()}


def main() -> None:
    write("census", {"blocks": blocks(), "suite_of_300_s": suite()})


if __name__ == "__main__":
    main()
