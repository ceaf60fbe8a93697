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
    """Return the share of the host's memory that each method returns."""
    return [
        {"sizes": sizes, **{method: cell("tensors", sizes, method) for method in METHODS}}
        for sizes in SIZES
    ]


def minilm() -> dict[str, Any]:
    """Return what each method returns of MiniLM after it has encoded 5,000 texts."""
    return {method: cell("minilm", method) for method in METHODS}


def wrapper() -> dict[str, Any]:
    """Return the median of five releases of an object that keeps MiniLM in a large program."""
    rows: dict[str, Any] = {}
    for method in METHODS:
        runs = sorted((cell("wrapper", method) for _ in range(5)), key=lambda run: float(run["ms"]))
        rows[method] = {**runs[2], "ms_of_all_runs": [round(run["ms"], 1) for run in runs]}
        rows[method]["worst_stall_ms"] = sorted(run["worst_stall_ms"] for run in runs)[2]
    return rows


def many_tensors() -> dict[str, Any]:
    """Measure a model of 16,000 tensors with gradients, beside a thread that looks at the clock."""
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
    return rows


def blocked_threads() -> dict[str, Any]:
    """Release a tensor of 50 MB in 20 rounds, alone and beside 60 blocked threads."""
    return {threads: cell("blocked", threads) for threads in ("0", "60")}


def nothing_to_do() -> dict[str, Any]:
    """Return what a call with nothing to do, and the import, cost beside an empty one."""
    import torch  # noqa: F401

    from torch_utils import safe_cuda_empty_cache

    def plain() -> bool:
        return False

    def best(function: Any) -> float:
        return min(timeit.repeat(function, number=100_000, repeat=9)) / 100_000 * 1e6

    extra = best(safe_cuda_empty_cache) - best(plain)
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
    return median("import sys; sys.path.insert(0, ''); import torch_utils") - empty


SECTIONS = (tensors, minilm, wrapper, many_tensors, blocked_threads, nothing_to_do)


def main() -> None:
    write("release", {section.__name__: section() for section in SECTIONS})


if __name__ == "__main__":
    main()
