"""Draw resident memory over two rounds of load, encode, unload: docs/memory.svg.

Usage: plot_memory.py [--redraw]

With --redraw the picture is drawn from the last run's file, and nothing is measured.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS, write

DOCS = Path(__file__).resolve().parent.parent / "docs"
METHODS = {
    "del": ("del model", "#a33"),
    "accelerate": ("accelerate.release_memory", "#c80"),
    "torch_utils": ("torch_utils.release", "#2c7a2c"),
}
POINTS = 120  # A curve: the picture has no more pixels to show.

Samples = list[tuple[float, float]]


def thinned(samples: Samples, points: int = POINTS) -> Samples:
    """Keep the lowest and the highest sample of each stretch, so that no peak and no fall goes."""
    if len(samples) <= points:
        return [(round(at, 3), round(size, 1)) for at, size in samples]
    kept = {0, len(samples) - 1}
    stretches = points // 2 - 1
    for n in range(stretches):
        stretch = range(n * len(samples) // stretches, (n + 1) * len(samples) // stretches)
        kept.add(min(stretch, key=lambda i: samples[i][1]))
        kept.add(max(stretch, key=lambda i: samples[i][1]))
    return [(round(samples[i][0], 3), round(samples[i][1], 1)) for i in sorted(kept)]


def measure() -> dict[str, Any]:
    """Run the three ways, each in a process of its own, and write what they took."""
    from benchmarks.bench_release import cell

    curves = {method: cell("curve", method) for method in METHODS}
    for curve in curves.values():
        curve["samples"] = thinned(curve["samples"])
        curve["marks"] = [(round(at, 3), name) for at, name in curve["marks"]]
    write("memory_curve", {"curves": curves})
    return curves


def draw(curves: dict[str, Any]) -> None:
    """Draw one panel a method, for they take different times, with the rounds named in each."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(METHODS), figsize=(9, 3.2), sharey=True)
    for axes, (method, (label, colour)) in zip(panels, METHODS.items(), strict=True):
        times, sizes = zip(*curves[method]["samples"], strict=True)
        axes.plot(times, [size - sizes[0] for size in sizes], color=colour, linewidth=1.3)
        axes.set_title(label, fontsize=10, color=colour)
        starts = [at for at, name in curves[method]["marks"] if name == "load"]
        ends = [at for at, name in curves[method]["marks"] if name == "unload"]
        for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
            axes.axvspan(start, end, color="0.95", linewidth=0)
            middle = (start + end) / 2
            axes.text(middle, 6, f"round {number}", fontsize=8, color="0.4", ha="center")
        axes.set_xlabel("seconds", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("resident memory\nover the start (MB)", fontsize=9)
    figure.tight_layout()
    figure.savefig(DOCS / "memory.svg", metadata={"Date": None})


if __name__ == "__main__":
    last = RESULTS / "memory_curve.json"
    draw(json.loads(last.read_text())["curves"] if "--redraw" in sys.argv[1:] else measure())
