"""Measure what clean-exit adds to a program, and how long clean-exit-lint takes on many files.

The probe alone and the whole command alternate with the bare program, and medians are compared. Of
the linter the processor time counts, because other programs may use the machine.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from benchmarks.results_file import write
from clean_exit.command import add_probe
from clean_exit.lint import python_files

ROUNDS = 5
PROGRAMS = {
    "nothing": "",
    "numpy": "import numpy",
    "torch": "import torch",
    "logging": (
        "import io, logging\nlogging.basicConfig(stream=io.StringIO())\n"
        "for _ in range(20_000): logging.warning('%d', 1)"
    ),
    "errors": (
        "class A:\n    def __del__(self): raise ValueError('gone')\nfor _ in range(20_000): A()"
    ),
    "stderr": (
        "import os\ndata = (b'x' * 99 + b'\\n') * 600\n"
        "for _ in range(1 << 14):\n"
        "    view = memoryview(data)\n"
        "    while view: view = view[os.write(2, view) :]"
    ),
}
FEWER_ROUNDS = {"torch": 3, "errors": 1, "stderr": 1}


def seconds(command: list[str], environment: dict[str, str]) -> float:
    started = time.perf_counter()
    # The command exits with 120 for an unclean program.
    subprocess.run(command, env=environment, check=False, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def compare(name: str, source: str, folder: str, rounds: int) -> dict[str, float | str]:
    bare = [sys.executable, "-c", source]
    probed = add_probe(os.environ, folder, 5.0)
    checked = [sys.executable, "-m", "clean_exit", "-q", "--", *bare]
    times: dict[str, list[float]] = {"bare": [], "probe": [], "command": []}
    for _ in range(rounds):
        times["bare"].append(seconds(bare, dict(os.environ)))
        times["probe"].append(seconds(bare, probed))
        times["command"].append(seconds(checked, dict(os.environ)))
    medians = {how: statistics.median(values) for how, values in times.items()}
    return {
        "program": name,
        "bare_s": medians["bare"],
        "probe_adds_s": medians["probe"] - medians["bare"],
        "command_adds_s": medians["command"] - medians["bare"],
    }


def linted(paths: list[str]) -> dict[str, float | int]:
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
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "events").touch()
        rows = [
            compare(name, source, folder, FEWER_ROUNDS.get(name, ROUNDS))
            for name, source in PROGRAMS.items()
        ]
    write("clean_exit", {"rounds": ROUNDS, "rows": rows})
    site = sysconfig.get_path("purelib")
    some = [path for path in python_files([site]) if "/torch/_inductor/" in path][:200]
    sizes = {
        "everything installed, with torch and transformers": [site],
        "200 files of torch/_inductor": some,
        "this repository's packages": ["torch_utils", "rag_demo"],
    }
    files = [{"what": what, **linted(paths)} for what, paths in sizes.items()]
    write("clean_exit_lint", {"rows": files})


if __name__ == "__main__":
    main()
