"""What it takes to change one document, to filter, and to search by words, among many.

Each beside the same work done by numpy, faiss or bm25s in the same run; rounds alternate.
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
import faiss
import numpy as np

from benchmarks.bench_rag import DIMENSION, make
from benchmarks.results_file import write
from rag_demo import FaissRetriever, PyTorchGPURetriever

WORDS = 20_000  # different ones; their counts fall as those of a language do


class Vectors:
    """An embedding model that has its vectors already."""

    name = "bench"
    dimension = DIMENSION

    def __init__(self, documents: Any, query: Any) -> None:
        self._documents, self._query = documents, query

    def embed_documents(self, texts: Any) -> Any:
        return self._documents[: len(texts)]

    def embed_query(self, text: str) -> Any:
        return self._query


def texts_of(count: int) -> list[str]:
    chance = np.random.default_rng(3)
    ranks = np.arange(1, WORDS + 1)
    words = chance.choice(WORDS, (count, 40), p=(1 / ranks) / (1 / ranks).sum())
    return [" ".join(f"w{word}" for word in row) for row in words.tolist()]


def alternate(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Time each way in turn; milliseconds, medians."""
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
    before = alternate({"search before": lambda: retriever.search("w5")}, rounds)
    during = alternate(
        {
            "add": lambda: retriever.add(["w1 w2"], [{"year": 2000}], [f"new{next(numbers)}"]),
            "replace": lambda: retriever.add(["w1 w2"], [{"year": 2000}], ["50"]),
            "delete": lambda: retriever.delete([str(next(gone))]),
            "next search": lambda: retriever.search("w5"),
        },
        rounds,
    )
    return before | during


def durable(retriever: Any, path: Path, rounds: int) -> dict[str, float]:
    """Change one document, and save the change into the index that was opened."""
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
    contents = retriever._contents

    def count(where: Any) -> int:
        return int(np.count_nonzero(contents.matching(where)))

    return alternate(
        {
            "where equal": lambda: count({"year": 2003}),
            "where range": lambda: count({"year": {"$gte": 2000, "$lt": 2010}}),
            "numpy, equal": lambda: np.count_nonzero(years == 2003),
            "where, with search": lambda: retriever.search("w5", where={"year": 2003}),
        },
        rounds,
    )


def words(retriever: Any, texts: list[str], rounds: int) -> dict[str, float]:
    start = time.perf_counter()
    cut = bm25s.tokenize(texts, return_ids=False, show_progress=False)
    index = bm25s.BM25(k1=1.5, b=0.75)
    index.index(cut, show_progress=False)
    found = {"bm25s, made": 1e3 * (time.perf_counter() - start)}
    start = time.perf_counter()
    retriever.search("w5 w700", mode="bm25")
    found["words, first after load"] = 1e3 * (time.perf_counter() - start)
    numbers = iter(range(10**6))

    def add_and_search() -> None:
        retriever.add(["w5 w9"], [{"year": 1999}], [f"w{next(numbers)}"])
        retriever.search("w5 w700", mode="bm25")

    def theirs() -> None:
        scores = index.get_scores(["w5", "w700"])
        best = np.argpartition(scores, -5)[-5:]
        best[np.argsort(-scores[best])]

    return found | alternate(
        {
            "words": lambda: retriever.search("w5 w700", mode="bm25"),
            "words, bm25s": theirs,
            "add and words": add_and_search,
        },
        rounds,
    )


def compared(rows: dict[str, Any]) -> dict[str, float]:
    """Say how many times as fast each was as what it stands beside."""
    found = {}
    for kind, row in rows.items():
        if "next search" in row:
            found[f"{kind}: next search to the one before"] = (
                row["search before"] / row["next search"]
            )
        if "faiss, search" in row:
            found[f"{kind}: next search to faiss"] = row["faiss, search"] / row["next search"]
    where, words = rows["where"], rows["words"]
    found["where equal to numpy"] = where["numpy, equal"] / where["where equal"]
    found["words to bm25s"] = words["words, bm25s"] / words["words"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    documents, query = make(options.count, 0), make(1, 1)[0]
    texts = texts_of(options.count)
    years = np.random.default_rng(4).integers(1950, 2025, options.count)
    metadata = [{"year": year, "lang": "en"} for year in years.tolist()]
    names = [str(n) for n in range(options.count)]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "index")
        model = Vectors(documents, query)
        index = faiss.IndexFlatIP(DIMENSION)
        index.add(documents)
        theirs = alternate({"faiss, search": lambda: index.search(query[None], 5)}, options.rounds)
        for kind in (PyTorchGPURetriever, FaissRetriever):
            with kind(model) as retriever:
                retriever.add(texts, metadata, names)
                rows[f"{kind.__name__}, in memory"] = theirs | changes(retriever, options.rounds)
                if kind is PyTorchGPURetriever:
                    retriever.delete([f"new{n}" for n in range(10**5)])
                    start = time.perf_counter()
                    retriever.save(path)
                    rows["save"] = {"save": 1e3 * (time.perf_counter() - start)}
                    rows["size"] = {
                        "MB": sum(each.stat().st_size for each in path.iterdir()) / 1e6,
                        "vectors alone, MB": documents.nbytes / 1e6,
                    }
        with PyTorchGPURetriever(model) as retriever:
            start = time.perf_counter()
            retriever.load(path)
            opened = time.perf_counter()
            np.count_nonzero(retriever._contents.matching({"year": 2003}))
            first = time.perf_counter()
            rows["opened"] = {
                "open": 1e3 * (opened - start),
                "first where": 1e3 * (first - opened),
            }
            rows["where"] = filters(retriever, years, options.rounds)
            rows["words"] = words(retriever, texts, options.rounds)
            rows["opened, changes"] = changes(retriever, options.rounds)
            rows["durable"] = durable(retriever, path, options.rounds)
    for what, row in rows.items():
        print(what)
        for name, value in row.items():
            print(f"  {name:28} {value:14,.3f}")
    ratios = compared(rows)
    print("ratios")
    for name, value in ratios.items():
        print(f"  {name:52} {value:8.2f}")
    write(
        "change",
        {"count": options.count, "rounds": options.rounds, "ms": rows, "ratios": ratios},
    )


if __name__ == "__main__":
    main()
