"""Measure how long a saved index of a million vectors takes to open and to answer.

faiss reads a file with the same vectors as a whole and compares no checksum.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

# See bench_rag.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import faiss
import numpy as np

from benchmarks.bench_rag import DIMENSION, Vectors
from benchmarks.results_file import write
from rag_demo import PyTorchGPURetriever
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.reading.document import Document
from rag_demo.stores.index_folder import open_writer
from rag_demo.stores.store import EmbeddedBatch
from torch_utils import measuring, memory_snapshot

ROUNDS = 5


class Texts:
    """Short texts that are created when they are read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, number: int) -> Document:
        return Document(str(number), f"the text of document {number}", {})


def first_answers(folder: Path, file: Path, query: Any) -> dict[str, float]:
    """Open both indexes by turns and search each twice; return medians in seconds."""
    times: dict[str, list[float]] = {}

    def add(name: str, way: Any, *arguments: Any) -> Any:
        with measuring("cpu") as taken:
            result = way(*arguments)
        times.setdefault(name, []).extend(taken.host_s)
        return result

    for _ in range(ROUNDS):
        with PyTorchGPURetriever(Vectors(query[None], query[None]), device="cpu") as retriever:
            add("open_s", retriever.load, folder)
            add("first_answer_s", retriever.search, "question")
            add("next_answer_s", retriever.search, "question")
        index = add("faiss_open_s", faiss.read_index, str(file))
        add("faiss_first_answer_s", index.search, query[None], 5)
        add("faiss_next_answer_s", index.search, query[None], 5)
        del index
    return {name: statistics.median(its) for name, its in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1_000_000)
    count = parser.parse_args().count
    texts = Texts(count)
    chance = np.random.default_rng(0)
    vectors = chance.standard_normal((count, DIMENSION), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    query = vectors[0].copy()
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name, "index"), Path(name, "faiss")
        with measuring("cpu") as taken:
            documents = map(texts.read, range(count))
            with open_writer(folder) as writer:
                writer.clear(ModelIdentity("bench"))
                owners, wholes = np.arange(count), np.zeros((count, 2), np.int32)
                writer.upsert(EmbeddedBatch(list(documents), owners, wholes, vectors, None))
                writer.commit()
        row = {"save_s": taken.median_s}
        row["index_bytes"] = sum(path.stat().st_size for path in folder.iterdir())
        row["size_ratio_to_vectors"] = row["index_bytes"] / vectors.nbytes
        index = faiss.IndexFlatIP(DIMENSION)
        index.add(vectors)
        faiss.write_index(index, str(file))
        del vectors, index
        with PyTorchGPURetriever(Vectors(query[None], query[None]), device="cpu") as retriever:
            before = memory_snapshot().host.rss_bytes
            retriever.load(folder)
            row["resident_after_open_bytes"] = memory_snapshot().host.rss_bytes - before
        row |= first_answers(folder, file, query)
    write("open", {"count": count, "dimension": DIMENSION, **row})


if __name__ == "__main__":
    main()
