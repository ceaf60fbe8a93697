"""Measure what `rag-demo index --actors` costs beside the plain command: seconds of processors.

Sentences of SciFact (``--beir`` names its folder) are indexed by both, and abstracts by one actor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.results_file import write

EVERY_S = 0.05
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def role(process: psutil.Process, main: int) -> str:
    if process.pid == main:
        return "driver"
    return "actors" if "EmbeddingActor" in " ".join(process.cmdline()) else "rest of Ray"


def index(texts: list[str], folder: Path, *options: str) -> dict[str, Any]:
    """Index texts; return the seconds of processors by role, and the whole time in seconds."""
    source = folder / "source.jsonl"
    lines = (json.dumps({"id": str(n), "text": text}) for n, text in enumerate(texts))
    source.write_text("\n".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "rag_demo", "index", source, "--no-cache", "--out"]
    started = time.perf_counter()
    whole = psutil.Popen([*command, folder / f"index{len(options)}", *options], env=ENVIRONMENT,
                         stdout=subprocess.DEVNULL)  # fmt: skip
    used: dict[int, tuple[str, float]] = {}
    while whole.poll() is None:
        for process in [whole, *whole.children(recursive=True)]:
            try:
                times = process.cpu_times()
                used[process.pid] = role(process, whole.pid), times.user + times.system
            except psutil.Error:  # It has ended; its last value counts.
                continue
        time.sleep(EVERY_S)
    assert whole.returncode == 0
    seconds: Counter[str] = Counter()
    for name, taken in used.values():
        seconds[name] += taken
    return {"processor_s": dict(seconds), "all_s": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beir", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20_000)
    options = parser.parse_args()
    corpus = (options.beir / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    abstracts = [json.loads(line)["text"] for line in corpus]
    sentences = [each for text in abstracts for each in text.split(". ") if len(each) > 40]
    rows = {}
    runs: dict[str, tuple[list[str], list[str]]] = {
        "plain": (sentences[: options.count], []),
        "ray": (sentences[: options.count], ["--actors", "2"]),
        "one actor, abstracts": (
            abstracts[: options.count // 40],
            ["--actors", "1"],
        ),
    }
    for name, (texts, extra) in runs.items():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = {"texts": len(texts), **index(texts, Path(folder), *extra)}
    write("ray", {"rows": rows})


if __name__ == "__main__":
    main()
