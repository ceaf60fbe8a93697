"""Measure how long clean-exit-lint takes on all installed packages and on 200 of their files.

The processor time stands beside the elapsed time, because other programs may use the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time

from benchmarks.results_file import write
from clean_exit.lint import python_files


def timed(paths: list[str]) -> dict[str, float | int]:
    """Run the command once on paths; return the number of files and the seconds."""
    command = [sys.executable, "-m", "clean_exit.lint", "--format", "json", *paths]
    before, began = os.times(), time.monotonic()
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    )
    clock_s, after = time.monotonic() - began, os.times()
    if done.returncode not in (0, 1):
        raise RuntimeError(f"clean-exit-lint ended with {done.returncode}")
    processor_s = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    files = len(list(python_files(paths)))
    return {"files": files, "processor_s": round(processor_s, 2), "clock_s": round(clock_s, 2)}


def main() -> None:
    """Measure three sizes."""
    site = sysconfig.get_path("purelib")
    some = [path for path in python_files([site]) if "/torch/_inductor/" in path][:200]
    rows = [
        {"what": "everything installed, with torch and transformers", **timed([site])},
        {"what": "200 files of torch/_inductor", **timed(some)},
        {"what": "this repository's packages", **timed(["torch_utils", "rag_demo"])},
    ]
    for row in rows:
        print(row)
    write("clean_exit_lint", {"rows": rows})


if __name__ == "__main__":
    main()
