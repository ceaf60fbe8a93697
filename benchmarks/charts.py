"""Charts of the documentation, drawn from ``benchmarks/results``: ``python -m benchmarks.charts``.

They are docs/memory-left-*.svg, docs/search-ratio.svg and docs/check-cost.svg. `bench_cycles` draws
docs/hosting.svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS

DOCS = Path(__file__).resolve().parent.parent / "docs"
POINTS = 240  # per curve; the picture cannot show more
INK, OURS, OTHER = "#1c2430", "#2c9a4b", "#8b949e"
WAYS = {
    "del": "del model",
    "del+gc": "del model; gc.collect()",
    "accelerate": "accelerate.release_memory",
    "torch_utils": "torch_utils.release",
}

PROGRAMS = {
    "nothing": "an empty program",
    "numpy": "`import numpy`",
    "torch": "`import torch`",
    "logging": "20,000 log records",
    "errors": "20,000 errors in destructors",
    "stderr": "1 GB written to stderr",
}

Samples = list[tuple[float, float]]


def pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    return plt


def thinned(samples: Samples) -> Samples:
    """Keep the lowest and the highest sample of each stretch, so that each peak stays."""
    if len(samples) <= POINTS:
        return [(round(at, 3), round(size, 1)) for at, size in samples]
    kept = {0, len(samples) - 1}
    stretches = POINTS // 2 - 1
    for n in range(stretches):
        stretch = range(n * len(samples) // stretches, (n + 1) * len(samples) // stretches)
        kept.add(min(stretch, key=lambda i: samples[i][1]))
        kept.add(max(stretch, key=lambda i: samples[i][1]))
    return [(round(samples[i][0], 3), round(samples[i][1], 1)) for i in sorted(kept)]


def save(figure: Any, name: str) -> None:
    """Write a picture for the documentation."""
    figure.tight_layout()
    is_dark = "dark" in name  # The others need a ground on a dark page.
    figure.savefig(DOCS / name, transparent=is_dark, metadata={"Date": None})


def result(name: str) -> Any:
    """Return the last result of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def bars(
    name: str, title: str, sizes: dict[str, float], ours: set[str], form: str, ink: str = INK
) -> None:
    """Draw a bar for each label; those in ``ours`` are green."""
    figure, axes = pyplot().subplots(figsize=(7.2, 0.7 + 0.3 * len(sizes)))
    colours = [OURS if label in ours else OTHER for label in sizes]
    drawn = axes.barh(list(sizes), list(sizes.values()), color=colours)
    axes.bar_label(drawn, fmt=form, padding=4, color=ink, fontsize=9)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10, color=ink)
    axes.tick_params(left=False, bottom=False, labelbottom=False, labelsize=9, colors=ink)
    axes.spines[:].set_visible(False)
    axes.margins(x=0.12)
    save(figure, name)


def main() -> None:
    left = {
        WAYS[way]: row["grown_mb"] * (1 - row["percent"] / 100)
        for way, row in result("release")["minilm"].items()
    }
    title = "Memory that remains of an embedding model"
    for theme, ink in {"light": INK, "dark": "#e6edf3"}.items():
        bars(f"memory-left-{theme}.svg", title, left, {WAYS["torch_utils"]}, "%.0f MB", ink)
    ratios = {}
    for cell in result("rag")["cells"]:
        times = dict(cell["median_s"])
        ours_s = times.pop("torch_utils")
        ratios[f"{cell['count']:,} documents x {cell['batch']}"] = min(times.values()) / ours_s
    title = "Exact search: time of the fastest other library / ours"
    faster = {label for label, ratio in ratios.items() if ratio >= 1}
    bars("search-ratio.svg", title, ratios, faster, "%.1f")
    adds = {
        PROGRAMS[row["program"]].replace("`", ""): 1e3 * row["command_adds_s"]
        for row in result("clean_exit")["rows"]
    }
    bars("check-cost.svg", "What clean-exit adds to a program", adds, set(adds), "%.0f ms")


if __name__ == "__main__":
    main()
