"""Draw docs/memory.svg, memory over time, and docs/memory-left-*.svg, the memory that remains.

Usage: plot_memory.py [--redraw]

--redraw draws the last results again and measures nothing. The second picture shows a result of
bench_release.
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
POINTS = 120  # per curve; the picture cannot show more

Samples = list[tuple[float, float]]


def thinned(samples: Samples, points: int = POINTS) -> Samples:
    """Keep the lowest and the highest sample of each stretch, so that each peak stays."""
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
    """Run the three ways, each in its own process, and write their memory over time."""
    from benchmarks.bench_release import cell

    curves = {method: cell("curve", method) for method in METHODS}
    for curve in curves.values():
        curve["samples"] = thinned(curve["samples"])
        curve["marks"] = [(round(at, 3), name) for at, name in curve["marks"]]
    write("memory_curve", {"curves": curves})
    return curves


def panels(curves: dict[str, Samples], labels: dict[str, tuple[str, str]], unit: str) -> Any:
    """Return a figure with one panel for each curve, because the curves take different times."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(9, 3.2), sharey=True)
    for axes, (name, samples) in zip(panels, curves.items(), strict=True):
        label, colour = labels[name]
        axes.plot(*zip(*samples, strict=True), color=colour, linewidth=1.2)
        axes.set_title(label, fontsize=10, color=colour)
        axes.set_xlabel("seconds", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(unit, fontsize=9)
    return figure


def save(figure: Any, name: str) -> None:
    """Write a picture for the documentation."""
    figure.tight_layout()
    figure.savefig(DOCS / name, metadata={"Date": None})


def draw(curves: dict[str, Any]) -> None:
    """Draw docs/memory.svg, with the rounds named in each panel."""
    grown = {
        name: [(at, size - curve["samples"][0][1]) for at, size in curve["samples"]]
        for name, curve in curves.items()
    }
    figure = panels(grown, METHODS, "resident memory\nover the start (MB)")
    for axes, curve in zip(figure.axes, curves.values(), strict=True):
        starts = [at for at, name in curve["marks"] if name == "load"]
        ends = [at for at, name in curve["marks"] if name == "unload"]
        for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
            axes.axvspan(start, end, color="0.95", linewidth=0)
            axes.text((start + end) / 2, 6, f"round {number}", fontsize=8, color="0.4", ha="center")
    save(figure, "memory.svg")


def result(name: str) -> Any:
    """Return the last result of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def draw_left(minilm: dict[str, Any]) -> None:
    """Draw docs/memory-left-*.svg: what remains of MiniLM after each way to free it."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    left = {way: row["grown_mb"] * (1 - row["percent"] / 100) for way, row in minilm.items()}
    labels = {
        "del": "del model",
        "del+gc": "del model; gc.collect()",
        "accelerate": "accelerate.release_memory",
        "torch_utils": "torch_utils.release",
    }
    for theme, colour in {"light": "#1c2430", "dark": "#e6edf3"}.items():
        figure, axes = plt.subplots(figsize=(7.2, 1.9))
        colours = ["#8b949e" if way != "torch_utils" else "#2c9a4b" for way in labels]
        bars = axes.barh(list(labels.values()), [left[way] for way in labels], color=colours)
        axes.bar_label(bars, fmt="%.0f MB", padding=4, color=colour, fontsize=9)
        axes.invert_yaxis()
        axes.set_title("Memory that remains of an embedding model", fontsize=10, color=colour)
        axes.tick_params(left=False, bottom=False, labelbottom=False, labelsize=9, colors=colour)
        axes.spines[:].set_visible(False)
        axes.margins(x=0.12)
        figure.tight_layout()
        name = f"memory-left-{theme}.svg"
        figure.savefig(DOCS / name, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    draw(result("memory_curve")["curves"] if "--redraw" in sys.argv[1:] else measure())
    draw_left(result("release")["minilm"])
