"""What clean-exit adds to a program: the probe alone, and the whole command.

Each pair runs alternately, so that both see the same noise; medians are compared. Also what it
does not do, because it would cost more: listen to all that a program does by an audit hook; and
what pytest's start takes longer with the plug-in.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results_file import write
from torch_utils.clean_exit.command import add_probe

ROUNDS = 5
PROGRAMS = {
    "nothing": "",
    "numpy": "import numpy",
    "torch": "import torch",
    "audited": "for _ in range(20_000): open('/dev/null').close()",
    "id": "x = 1\nfor _ in range(1_000_000): id(x)",
    "deepcopy": (
        "import copy\nd = {i: [i] for i in range(100)}\nfor _ in range(500): copy.deepcopy(d)"
    ),
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
    # A dirty program makes the command say 120.
    subprocess.run(command, env=environment, check=False, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def compare(name: str, source: str, events: Path, rounds: int) -> dict[str, float | str]:
    bare = [sys.executable, "-c", source]
    _, probed = add_probe(bare, os.environ, events)
    checked = [sys.executable, "-m", "torch_utils.clean_exit", "-q", "--", *bare]
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


# Prints the time of each of several runs of the same work, in seconds.
WORK = """
import sys, time
{before}
x = 1
{prepare}
for _ in range(7):
    started = time.perf_counter()
    {work}
    print(time.perf_counter() - started)
"""
AUDITED = {
    "id": ("", f"for _ in range(20_000): {'id(x); ' * 20}"),
    "deepcopy": (
        "import copy; d = {i: [i] for i in range(100)}",
        "for _ in range(100): copy.deepcopy(d)",
    ),
    "logging": (
        "import io, logging; logging.basicConfig(stream=io.StringIO())",
        "for _ in range(5_000): logging.warning('%d', 1)",
    ),
}
# As small as one can be that picks out a single event.
HOOK = "sys.addaudithook(lambda event, args: event == 'sys.unraisablehook' and print(args))"
PLUGIN = (
    "import time, pytest\nstarted = time.perf_counter()\nimport _torch_cleanup.pytest_plugin\n"
    "print(time.perf_counter() - started)"
)


def least(source: str) -> float:
    """Return the least of the times that a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", source], check=True, stdout=subprocess.PIPE, text=True
    )
    return min(map(float, done.stdout.split()))


def compare_audited(name: str, rounds: int) -> dict[str, float | str]:
    """Return how many times as long some work takes with a small audit hook: the least of each."""
    prepare, work = AUDITED[name]
    times: dict[str, list[float]] = {"": [], HOOK: []}
    for _ in range(rounds):
        for before, taken in times.items():
            taken.append(least(WORK.format(before=before, prepare=prepare, work=work)))
    return {"work": name, "times_as_slow": min(times[HOOK]) / min(times[""])}


def costs(result: dict[str, Any]) -> list[str]:
    """Return the sentences of the documentation that these figures are in."""
    slow = {row["work"]: f"{row['times_as_slow']:.1f} times" for row in result["audit_hook"]}
    return [
        f"there is no audit hook, which would make each `id()` {slow['id']} as slow, "
        f"`copy.deepcopy` {slow['deepcopy']} and a log record {slow['logging']}",
        f"loaded in {1e3 * result['plugin_s']:.1f} ms",
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder, "events")
        events.touch()
        rows = [
            compare(name, source, events, FEWER_ROUNDS.get(name, ROUNDS))
            for name, source in PROGRAMS.items()
        ]
    print(f"{'program':10} {'bare':>10} {'probe adds':>12} {'clean-exit adds':>16}")
    for row in rows:
        bare, probe, command = (
            float(row[name]) * 1e3 for name in ("bare_s", "probe_adds_s", "command_adds_s")
        )
        print(f"{row['program']:10} {bare:7.1f} ms {probe:9.1f} ms {command:13.1f} ms")
    audited = [compare_audited(name, ROUNDS) for name in AUDITED]
    plugin_s = min(least(PLUGIN) for _ in range(3 * ROUNDS))
    result = {"rounds": ROUNDS, "rows": rows, "audit_hook": audited, "plugin_s": plugin_s}
    print(*costs(result), sep="\n")
    write("clean_exit", result)


if __name__ == "__main__":
    main()
