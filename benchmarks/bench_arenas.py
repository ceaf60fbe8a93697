"""Measure what one heap of glibc for all threads costs, and what it gives back.

Usage: bench_arenas.py [--rounds N]

glibc gives each thread a heap of its own (an "arena"), and `malloc_trim` cannot return the free end
of another thread's. Eight threads encode texts with all-MiniLM-L6-v2, copy arrays with numpy,
or parse JSON, for some seconds; then four threads load a model and use it, one
after the other, and all models are released. The settings alternate, in the order ABC CBA, each in
a process of its own. Writes results/arenas.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench_cycles import TEXTS, load
from benchmarks.results_file import write
from torch_utils._memory import share_heap

THREADS, SECONDS = 8, 3.0
JEMALLOC = next(Path("/usr/lib").glob("*/libjemalloc.so.2"), None)
SETTINGS = {
    "glibc": {},
    "shared_heap": {"SHARED_HEAP": "1"},
    "MALLOC_ARENA_MAX=1": {"MALLOC_ARENA_MAX": "1"},
    **({"jemalloc": {"LD_PRELOAD": str(JEMALLOC)}} if JEMALLOC else {}),
}


def encode() -> Callable[[int], None]:
    model = load()
    return lambda number: model.encode(TEXTS[:32], show_progress_bar=False)


def arrays(half: bool) -> Callable[[int], None]:
    import numpy as np

    sizes = [int(1024 * 4096 ** random.Random(n).random()) // 8 for n in range(997)]

    def work(number: int) -> None:
        ones = np.ones(sizes[number % 997])
        middle = len(ones) // 2 if half else len(ones)
        float(np.concatenate([ones[:middle], (ones + 1)[-middle:]]).sum())

    return work


def parse() -> Callable[[int], None]:
    items = [{"id": n, "tags": ["x" * n, None], "text": "lorem ipsum " * n} for n in range(60)]
    return lambda number: json.loads(json.dumps(items)) and None


WORK: dict[str, Callable[[], Callable[[int], None]]] = {
    "encode 32 texts": encode,
    "numpy, copies of 1 KB to 4 MB": partial(arrays, True),
    "numpy, copies of 2 KB to 8 MB": partial(arrays, False),
    "json": parse,
}


def cost(name: str) -> dict[str, float]:
    """Return the calls per second of eight threads, and the processor time of a call."""
    work, counts, start, end = WORK[name](), [0] * THREADS, threading.Barrier(THREADS + 1), [0.0]

    def run(thread: int) -> None:
        work(thread)
        start.wait()
        while time.perf_counter() < end[0]:
            work(counts[thread] * THREADS + thread)
            counts[thread] += 1

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    end[0] = time.perf_counter() + 3600
    start.wait()
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    end[0] = began + SECONDS
    for thread in threads:
        thread.join()
    after, took = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - began
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"per_s": sum(counts) / took, "cpu_ms": cpu / sum(counts) * 1000}


def memory() -> dict[str, float]:
    """Return the resident memory in MB that four models in four threads leave behind."""
    from torch_utils import release

    def resident_mb() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6

    def use() -> None:
        models.append(load())
        models[-1].encode(TEXTS[:200], show_progress_bar=False)

    models: list[Any] = [load()]
    models[0].encode(TEXTS[:200], show_progress_bar=False)
    release(models)
    before = resident_mb()
    for _ in range(4):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    release(models)
    return {"left_mb": resident_mb() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--work", choices=[*WORK, "memory"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        if os.environ.get("SHARED_HEAP"):
            assert share_heap()
        print(json.dumps(memory() if options.work == "memory" else cost(options.work)))
        return
    found: dict[str, dict[str, list[Any]]] = {name: {} for name in [*WORK, "memory"]}
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    for name, settings in found.items():
        for turn in range(options.rounds):
            for setting in list(SETTINGS)[:: -1 if turn % 2 else 1]:
                command = [sys.executable, "-m", "benchmarks.bench_arenas", "--work", name]
                environment = {**os.environ, **quiet, **SETTINGS[setting]}
                output = subprocess.check_output(command, env=environment, text=True)
                settings.setdefault(setting, []).append(json.loads(output.splitlines()[-1]))
        for setting, rows in settings.items():
            ratios = {}
            for key in rows[0]:
                pairs = zip(rows, settings["glibc"], strict=True)
                ratios[key] = statistics.median(row[key] / base[key] for row, base in pairs)
            print(
                name, setting, {key: round(ratio, 3) for key, ratio in ratios.items()}, flush=True
            )
    write("arenas", {"threads": THREADS, "seconds": SECONDS, "work": found})


if __name__ == "__main__":
    main()
