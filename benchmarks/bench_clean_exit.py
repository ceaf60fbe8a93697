"""Measure what the probe alone and the whole command add to a program.

The ways alternate, so that all meet the same conditions. The medians are compared.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results_file import write
from clean_exit.command import add_probe

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
    probed = add_probe(os.environ, folder)
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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "events").touch()
        rows = [
            compare(name, source, folder, FEWER_ROUNDS.get(name, ROUNDS))
            for name, source in PROGRAMS.items()
        ]
    print(f"{'program':10} {'bare':>10} {'probe adds':>12} {'clean-exit adds':>16}")
    for row in rows:
        bare, probe, command = (
            float(row[name]) * 1e3 for name in ("bare_s", "probe_adds_s", "command_adds_s")
        )
        print(f"{row['program']:10} {bare:7.1f} ms {probe:9.1f} ms {command:13.1f} ms")
    write("clean_exit", {"rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
