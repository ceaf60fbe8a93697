"""Measure changes of one document, filters and searches by words among many documents.

numpy or bm25s do the same work in the same run. Rounds alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import bm25s
import numpy as np

from benchmarks.bench_rag import Vectors, make
from benchmarks.results_file import write
from rag_demo import FaissRetriever, PyTorchGPURetriever

WORDS = 20_000  # distinct words, with frequencies as in a language


def texts_of(count: int) -> list[str]:
    chance = np.random.default_rng(3)
    ranks = np.arange(1, WORDS + 1)
    words = chance.choice(WORDS, (count, 40), p=(1 / ranks) / (1 / ranks).sum())
    return [" ".join(f"w{word}" for word in row) for row in words.tolist()]


def alternate(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Run the functions by turns; return the median of each in milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(its) for name, its in times.items()}


def changes(retriever: Any, rounds: int) -> dict[str, float]:
    numbers = iter(range(10**6))
    gone = iter(range(100, 10**6))
    before = alternate({"search before": lambda: retriever.search("w5", mode="dense")}, rounds)
    during = alternate(
        {
            "add": lambda: retriever.add(["w1 w2"], [{"year": 2000}], [f"new{next(numbers)}"]),
            "replace": lambda: retriever.add(["w1 w2"], [{"year": 2000}], ["50"]),
            "delete": lambda: retriever.delete([str(next(gone))]),
            "next search": lambda: retriever.search("w5", mode="dense"),
        },
        rounds,
    )
    return before | during


def durable(retriever: Any, path: Path, rounds: int) -> dict[str, float]:
    """Measure a change of one document together with saving it into an opened index."""
    retriever.save(path)
    numbers, gone = iter(range(10**6)), iter(range(50_000, 10**6))

    def change(way: Callable[[], object]) -> Callable[[], object]:
        return lambda: (way(), retriever.save(path))

    return alternate(
        {
            "add and save": change(
                lambda: retriever.add(["w1 w2"], [{"year": 2000}], [f"more{next(numbers)}"])
            ),
            "replace and save": change(
                lambda: retriever.add(["w1 w2"], [{"year": 2000}], ["60000"])
            ),
            "delete and save": change(lambda: retriever.delete([str(next(gone))])),
        },
        rounds,
    )


def filters(retriever: Any, years: Any, rounds: int) -> dict[str, float]:
    contents = retriever.store._snapshot

    def count(where: Any) -> int:
        return int(np.count_nonzero(contents.documents.matching(where, contents.alive)))

    where = {"year": 2003}
    return alternate(
        {
            "where equal": lambda: count({"year": 2003}),
            "where range": lambda: count({"year": {"$gte": 2000, "$lt": 2010}}),
            "numpy, equal": lambda: np.count_nonzero(years == 2003),
            "where, with search": lambda: retriever.search("w5", mode="dense", where=where),
        },
        rounds,
    )


def words(retriever: Any, texts: list[str], rounds: int) -> dict[str, float]:
    cut = bm25s.tokenize(texts, return_ids=False, show_progress=False)
    index = bm25s.BM25(k1=1.5, b=0.75)
    index.index(cut, show_progress=False)
    retriever.search("w5 w700", mode="bm25")  # reads the index of words
    numbers = iter(range(10**6))

    def add_and_search() -> None:
        retriever.add(["w5 w9"], [{"year": 1999}], [f"w{next(numbers)}"])
        retriever.search("w5 w700", mode="bm25")

    def theirs() -> None:
        scores = index.get_scores(["w5", "w700"])
        best = np.argpartition(scores, -5)[-5:]
        best[np.argsort(-scores[best])]

    return alternate(
        {
            "words": lambda: retriever.search("w5 w700", mode="bm25"),
            "words, bm25s": theirs,
            "add and words": add_and_search,
        },
        rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    documents, query = make(options.count, 0), make(1, 1)
    texts = texts_of(options.count)
    years = np.random.default_rng(4).integers(1950, 2025, options.count)
    metadata = [{"year": year, "lang": "en"} for year in years.tolist()]
    names = [str(n) for n in range(options.count)]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "index")
        model = Vectors(documents, query)
        for kind in (PyTorchGPURetriever, FaissRetriever):
            with kind(model) as retriever:
                retriever.add(texts, metadata, names)
                rows[f"{kind.__name__}, in memory"] = changes(retriever, options.rounds)
                if kind is PyTorchGPURetriever:
                    retriever.delete([f"new{n}" for n in range(10**5)])
                    retriever.save(path)
        with PyTorchGPURetriever(model) as retriever:
            retriever.load(path)
            rows["where"] = filters(retriever, years, options.rounds)
            rows["words"] = words(retriever, texts, options.rounds)
            rows["opened, changes"] = changes(retriever, options.rounds)
            rows["durable"] = durable(retriever, path, options.rounds)
    write("change", {"count": options.count, "rounds": options.rounds, "ms": rows})


if __name__ == "__main__":
    main()
