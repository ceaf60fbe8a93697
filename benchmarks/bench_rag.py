"""Compare exact search with faiss, sentence-transformers, numpy, torch and usearch.

All libraries use their public interfaces. The vectors exist before the measurement, so embedding
costs nothing here. Rounds alternate, and the medians are compared.

With ``--one-thread`` each library has one thread, and its processor time counts, which other work
on the machine hardly changes. The results go into a file of their own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# faiss and torch each have an OpenMP. Waiting threads of one must not spin and slow the other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "--one-thread" in sys.argv:  # The libraries read these when they are imported.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"

import faiss
import numpy as np
import torch
from sentence_transformers.util import semantic_search
from usearch.index import MetricKind
from usearch.index import search as usearch_search

from benchmarks.results_file import write
from rag_demo import PyTorchGPURetriever

DIMENSION, TOP_K = 384, 10
SIZES, BATCHES = (10_000, 200_000, 1_000_000), (1, 32, 512)
STEP = 64  # queries; the scores of all at once would take 2 GB


class Vectors:
    """An embedding model that returns vectors that exist already. A text is a number."""

    name = "bench"
    dimension = DIMENSION

    def __init__(self, documents: Any, queries: Any) -> None:
        self._documents, self._queries = documents, queries

    def embed_documents(self, texts: Any) -> Any:
        return self._documents[: len(texts)]

    def embed_queries(self, texts: Any) -> Any:
        return self._queries[: len(texts)]

    def embed_query(self, text: str) -> Any:
        return self._queries[0]


def make(count: int, seed: int) -> Any:
    """Return vectors of length 1 in a hundred loose clusters, as those of texts are."""
    chance = np.random.default_rng(seed)
    centres = np.random.default_rng(7).standard_normal((100, DIMENSION), dtype=np.float32)
    vectors = chance.standard_normal((count, DIMENSION), dtype=np.float32)
    vectors += 0.5 * centres[chance.integers(0, 100, count)]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


def numpy_search(documents: Any, queries: Any) -> Any:
    rows = []
    for some in np.split(queries, range(STEP, len(queries), STEP)):
        scores = some @ documents.T
        best = np.argpartition(scores, -TOP_K, axis=1)[:, -TOP_K:]
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
        rows.append(np.take_along_axis(best, order, axis=1))
    return np.concatenate(rows)


def torch_search(documents: Any, queries: Any) -> Any:
    steps = torch.from_numpy(queries).split(STEP)
    return torch.cat([torch.topk(some @ documents.T, TOP_K).indices for some in steps])


def peers(documents: Any, index: Any, retriever: Any) -> dict[str, Callable[[Any, int], Any]]:
    tensor, threads = torch.from_numpy(documents), torch.get_num_threads()
    return {
        "torch_utils": lambda q, b: retriever.search_batch(["0"] * b, TOP_K, mode="dense"),
        "faiss": lambda q, b: index.search(q, TOP_K),
        "semantic_search": lambda q, b: semantic_search(torch.from_numpy(q), tensor, top_k=TOP_K),
        "numpy": lambda q, b: numpy_search(documents, q),
        "torch": lambda q, b: torch_search(tensor, q),
        "usearch": lambda q, b: usearch_search(
            documents, q, TOP_K, MetricKind.IP, exact=True, threads=threads
        ),
    }


def cell(
    count: int, batch: int, rounds: int, all_peers: bool, clock: Callable[[], float]
) -> dict[str, Any]:
    documents, queries = make(count, 0), make(batch, 1)
    index = faiss.IndexFlatIP(DIMENSION)
    index.add(documents)
    names = [str(row) for row in range(count)]
    with PyTorchGPURetriever(Vectors(documents, queries), device="cpu") as retriever:
        retriever.add(names, ids=names)
        searches = peers(documents, index, retriever)
        if not all_peers:
            searches = {name: searches[name] for name in ("torch_utils", "faiss", "numpy", "torch")}
        found = searches["torch_utils"](queries, batch)
        true = (
            np.argsort(-(queries.astype(np.float64) @ documents.T.astype(np.float64)), axis=1)
            if (count * batch <= 5_000_000)
            else index.search(queries, TOP_K)[1]
        )
        hits = sum(
            len({int(result.id) for result in results} & set(rows[:TOP_K].tolist()))
            for results, rows in zip(found, true, strict=True)
        )
        times: dict[str, list[float]] = {name: [] for name in searches}
        for name in searches:
            searches[name](queries, batch)
        for _ in range(rounds):
            for name, search in searches.items():
                started = clock()
                search(queries, batch)
                times[name].append(clock() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min((name for name in medians if name != "torch_utils"), key=medians.__getitem__)
    return {
        "count": count,
        "batch": batch,
        "median_s": medians,
        "best": best,
        "ratio": medians[best] / medians["torch_utils"],
        "recall": hits / (batch * TOP_K),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one-thread", action="store_true")
    options = parser.parse_args()
    # The slowest peers take half a minute for a round of the largest cells.
    rows = [
        cell(
            count,
            batch,
            options.rounds * (5 if count < 100_000 else 1),
            all_peers=count * batch <= 50_000_000,
            clock=time.process_time if options.one_thread else time.perf_counter,
        )
        for count in options.sizes
        for batch in BATCHES
    ]
    measured = {"dimension": DIMENSION, "top_k": TOP_K, "rounds": options.rounds, "cells": rows}
    name = "rag_one_thread" if options.one_thread else "rag"
    write(name, {"threads": torch.get_num_threads(), **measured})


if __name__ == "__main__":
    main()
