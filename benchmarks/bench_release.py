"""Compare `release` with `del`, `gc.collect` and accelerate's release_memory.

Each cell runs in its own process: see release_cell.py.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import timeit
from pathlib import Path
from typing import Any

from benchmarks.results_file import write

CELL = Path(__file__).resolve().parent / "release_cell.py"
METHODS = ("del", "del+gc", "accelerate", "torch_utils")
SIZES = ("64 MB", "0.5-1 MB", "4-96 KB", "mixed")


def cell(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(CELL), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def tensors() -> list[dict[str, Any]]:
    print("\nHost memory returned, percent / milliseconds; only torch_utils keeps the variable")
    print(f"{'tensors':10}" + "".join(f"{m:>16}" for m in METHODS))
    rows = []
    for sizes in SIZES:
        row = {method: cell("tensors", sizes, method) for method in METHODS}
        rows.append({"sizes": sizes, **row})
        cells = "".join(f"{row[m]['percent']:9.1f}/{row[m]['ms']:<6.0f}" for m in METHODS)
        print(f"{sizes:10}{cells}", flush=True)
    return rows


def minilm() -> dict[str, Any]:
    print("\nMiniLM after encoding 5,000 texts")
    rows = {}
    for method in METHODS:
        rows[method] = row = cell("minilm", method)
        print(
            f"{method:12} {row['percent']:5.1f}% of {row['grown_mb']:.0f} MB back in "
            f"{row['ms']:.0f} ms, {row['full_collections']} full collections",
            flush=True,
        )
    return rows


def many_tensors() -> dict[str, Any]:
    print("\nA model of 16,000 tensors with gradients, beside a thread that looks at the clock")
    rows: dict[str, Any] = {}
    for shape in ("layers", "one module", "list", "dictionary"):
        for method in ("del+gc", "torch_utils"):
            runs = sorted(
                (cell("many", shape, method) for _ in range(9)),
                key=lambda run: float(run["us_per_tensor"]),
            )
            row = runs[len(runs) // 2]
            row["us_of_all_runs"] = [round(run["us_per_tensor"], 1) for run in runs]
            row["worst_stall_ms"] = max(run["worst_stall_ms"] for run in runs)
            rows[f"{shape}, {method}"] = row
            print(
                f"{shape:11} {method:12} {row['us_per_tensor']:5.1f} us a tensor "
                f"(of nine: {row['us_of_all_runs'][0]} to {row['us_of_all_runs'][-1]}), stall "
                f"{row['worst_stall_ms']:.1f} ms, {row['full_collections']} full collections",
                flush=True,
            )
    return rows


def blocked_threads() -> dict[str, Any]:
    print("\nA tensor of 50 MB in 20 rounds, alone and beside 60 blocked threads")
    rows = {threads: cell("blocked", threads) for threads in ("0", "60")}
    for threads, row in rows.items():
        print(
            f"{threads:>2} threads: {row['median_ms']:.1f} ms, at most {row['worst_ms']:.1f} ms, "
            f"{row['grown_mb']:.1f} MB left after all rounds",
            flush=True,
        )
    return rows


def nothing_to_do() -> dict[str, Any]:
    """Return what a call with nothing to do, and the import, cost beside an empty one."""
    import torch  # noqa: F401

    from torch_utils import safe_cuda_empty_cache

    def plain() -> bool:
        return False

    def best(function: Any) -> float:
        return min(timeit.repeat(function, number=100_000, repeat=9)) / 100_000 * 1e6

    extra = best(safe_cuda_empty_cache) - best(plain)
    print(f"\nsafe_cuda_empty_cache() with nothing to do: {extra:.2f} microseconds over a call")
    return {"empty_cache_extra_us": extra, "import_extra_ms": import_cost()}


def import_cost() -> float:
    def median(statement: str) -> float:
        times = []
        for _ in range(15):
            program = (
                f"import time; t = time.perf_counter(); {statement}; print(time.perf_counter() - t)"
            )
            done = subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True
            )
            times.append(float(done.stdout) * 1e3)
        return statistics.median(times)

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "empty_package")
        package.mkdir()
        (package / "__init__.py").touch()
        empty = median(f"import sys; sys.path.insert(0, {folder!r}); import empty_package")
    extra = median("import sys; sys.path.insert(0, ''); import torch_utils") - empty
    print(f"import torch_utils: {extra:.2f} ms over an empty package")
    return extra


SECTIONS = (tensors, minilm, many_tensors, blocked_threads, nothing_to_do)


def main() -> None:
    write("release", {section.__name__: section() for section in SECTIONS})


if __name__ == "__main__":
    main()
