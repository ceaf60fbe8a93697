"""Compare ``unload_model`` with ``del`` and a collection after encoding.

Each way runs in its own process. It reads the memory before loading, after encoding and after
unloading, and then repeats this for many rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.results_file import write

PROGRAM = """
import gc, json, sys
import torch
from rag_demo import EmbeddingModel
from torch_utils import memory_snapshot

ours, texts_count, rounds = sys.argv[1] == "unload_model", int(sys.argv[2]), int(sys.argv[3])
text = "about memory, caches and heaps "
texts = [f"number {n} " + text * (1 + n % 8) for n in range(texts_count)]

def rss():
    return memory_snapshot().host.rss_bytes

def once(texts):
    model = EmbeddingModel(device="cpu")
    model.embed_documents(texts)
    after = rss()
    if ours:
        model.unload_model()
    else:
        model._encoder = None
        gc.collect()
    return after

torch.ones(500, 500) @ torch.ones(500, 500)
import tokenizers, safetensors.torch
once(texts[:64])
first = [rss(), once(texts), rss()]  # Code, kernels and thread pools stay after the first time.
second = [rss(), once(texts), rss()]
ends = []
for _ in range(rounds):
    once(texts[:256])
    ends.append(rss())
print(json.dumps([first, second, ends]))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    rows: dict[str, dict[str, object]] = {}
    heads = ("first: taken", "back", "second: taken", "back", "growth in all")
    print(f"{'':14} {heads[0]} {heads[1]:>6} {heads[2]} {heads[3]:>4} {heads[4]:>13}")
    for way in ("unload_model", "del and gc"):
        first, second, ends = run(PROGRAM, way, options.texts, options.rounds)
        growth = ends[-1] - ends[0]
        line = f"{way:14}"
        for name, (before, loaded, after) in (("first", first), ("second", second)):
            taken, share = loaded - before, (loaded - after) / (loaded - before)
            rows.setdefault(way, {})[name] = {"taken_bytes": taken, "returned": share}
            line += f" {taken / 1e6:8.0f} MB {share:7.1%}"
        rows[way]["growth_bytes"] = growth
        print(f"{line} {growth / 1e6:11.1f} MB in {options.rounds} rounds")
    write("unload", {"texts": options.texts, "rounds": options.rounds, "ways": rows})


def run(program: str, *arguments: object) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    main()
