"""Draw resident memory over two rounds of load, encode, unload: docs/memory.svg."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from bench_release import cell
from results_file import write

mpl.use("svg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).resolve().parent.parent / "docs"
METHODS = {"del": "#a33", "accelerate": "#c80", "torch_utils": "#2c7a2c"}


def main() -> None:
    curves = {method: cell("curve", method) for method in METHODS}
    figure, axes = plt.subplots(figsize=(8, 3.6))
    for method, colour in METHODS.items():
        times, sizes = zip(*curves[method]["samples"], strict=True)
        base = sizes[0]
        label = {"del": "del model", "accelerate": "accelerate.release_memory"}.get(
            method, "torch_utils.release"
        )
        axes.plot(times, [size - base for size in sizes], color=colour, label=label)
    for at, name in curves["torch_utils"]["marks"]:
        axes.axvline(at, color="#2c7a2c", linewidth=0.5, linestyle=":")
        axes.annotate(name, (at, 0.98), xycoords=("data", "axes fraction"), fontsize=7, va="top")
    axes.set_xlabel("seconds")
    axes.set_ylabel("resident memory over the start (MB)")
    axes.set_title("MiniLM loaded, 1,000 texts encoded, unloaded; twice", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right", fontsize=8)
    figure.tight_layout()
    figure.savefig(DOCS / "memory.svg", metadata={"Date": None})
    write("memory_curve", {"curves": curves})


if __name__ == "__main__":
    main()
