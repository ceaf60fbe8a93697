"""Measure the Postgres store on a server of its own: quality, recall, times, and writing.

The collection is in BEIR's layout, for example SciFact. For the times, its vectors are copied with
noise until there are enough.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.results_file import write
from rag_demo import Document, EmbeddedBatch, EmbeddingModel, PgVectorRetriever, embed
from rag_demo.commands.evaluate import quality, read_queries
from rag_demo.reading.sources import Skipped, read_source
from tests.support.postgres_server import PostgresServer

BATCH = 1_000


def measure_quality(url, folder, model):
    """Return quality and times by mode, and the vectors of documents and queries."""
    documents = list(read_source(f"{folder}/corpus.jsonl", Skipped()))
    judged, judgements = read_queries(folder)
    vectors, rows = [], {}
    with PgVectorRetriever(model, url, "quality") as retriever:
        for start in range(0, len(documents), BATCH):
            batch = embed(documents[start : start + BATCH], model, passages=False)
            vectors.append(batch.vectors)
            retriever.store.upsert(batch)
        for mode in ("bm25", "dense", "hybrid"):
            scores = quality(judged, judgements, retriever, mode=mode)
            rows[mode] = {metric: {"mean": score} for metric, score in scores.items()}
            print(mode, rows[mode])
        texts = list(judged.values())[:100]
        queries = model.embed_queries(texts)
        for mode in rows:
            times = []
            for text, vector in zip(texts, queries, strict=True):
                start_s = time.perf_counter()
                retriever.search_batch([text], 10, mode=mode, vectors=vector[None])
                times.append(time.perf_counter() - start_s)
            rows[mode]["query_ms"] = 1000 * median(times)
    return rows, np.concatenate(vectors), queries


def scale(url, base, queries, count, identity):
    """Write many vectors, and search them."""
    chance = np.random.default_rng(7)
    result = {"vectors": count, "dimension": base.shape[1], "kinds": {"exact": {}}}
    written_s = 0.0
    with PgVectorRetriever(_Named(identity), url, "scale") as retriever:
        for start in range(0, count, BATCH):
            chosen = base[chance.integers(0, len(base), BATCH)]
            noise = chance.standard_normal(chosen.shape) * 0.5 / np.sqrt(base.shape[1])
            vectors = (chosen + noise).astype(np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            documents = [Document(f"d{n}", f"text {n % 1000} of many", {"group": n % 100})
                         for n in range(start, start + BATCH)]  # fmt: skip
            batch = EmbeddedBatch(
                documents, np.arange(BATCH), np.zeros((BATCH, 2), np.int32), vectors, identity
            )
            start_s = time.perf_counter()
            retriever.store.upsert(batch)
            written_s += time.perf_counter() - start_s
        result["rows_per_s"] = count / written_s
        result["bytes"] = retriever.stats().nbytes
    with PgVectorRetriever(_Named(identity), url, "scale") as retriever:
        for name, where in (("all", None), ("one in 100", {"group": 7})):
            times = []
            for vector in queries:
                start_s = time.perf_counter()
                retriever.search(None, 10, vector=vector, where=where)
                times.append(time.perf_counter() - start_s)
            result["kinds"]["exact"][name] = {"ms": 1000 * median(times)}
    return result


class _Named:
    """Stands for the model, which embeds nothing here."""

    def __init__(self, identity):
        self.identity = identity
        self.dimension = 0

    def embed_query(self, text):
        raise AssertionError

    def embed_documents(self, texts):
        raise AssertionError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beir", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100_000)
    options = parser.parse_args()
    server = PostgresServer()
    try:
        with EmbeddingModel(cache=os.environ.get("CACHE")) as model:
            modes, base, queries = measure_quality(server.url, options.beir, model)
            identity = model.identity
        sizes = scale(server.url, base, queries, options.count, identity)
        (version,) = server.execute(
            "SELECT version(), extversion FROM pg_extension WHERE extname = 'vector'"
        )
    finally:
        server.close()
    write(
        "postgres",
        {
            "server": version[0].split(" on ")[0],
            "pgvector": version[1],
            "collection": options.beir.name,
            "passages": False,
            "modes": modes,
            "scale": sizes,
        },
    )


if __name__ == "__main__":
    main()
