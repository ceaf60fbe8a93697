"""How long a saved index of a million vectors takes to open, and to answer."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from results_file import write

from rag_demo import PyTorchGPURetriever
from rag_demo.documents.document import Document
from rag_demo.documents.rows import DocumentRows
from rag_demo.index import write_index
from rag_demo.searching.derived import derived_arrays
from torch_utils import measuring, memory_snapshot

COUNT, DIMENSION, ROUNDS = 1_000_000, 384, 5


class Query:
    """An embedding model with one question."""

    name = "bench"
    dimension = DIMENSION

    def __init__(self, vector: Any) -> None:
        self._vector = vector

    def embed_query(self, text: str) -> Any:
        return self._vector

    def embed_documents(self, texts: Any) -> Any:
        return np.stack([self._vector] * len(texts))


class Texts:
    """A million short texts, made when they are read."""

    def __len__(self) -> int:
        return COUNT

    def read(self, number: int) -> Document:
        return Document(str(number), f"the text of document {number}", {})


def main() -> None:
    chance = np.random.default_rng(0)
    vectors = chance.standard_normal((COUNT, DIMENSION), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    model = Query(vectors[0])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "index")
        rows = DocumentRows(COUNT)
        with measuring("cpu") as taken:
            derived = derived_arrays(vectors, Texts(), rows)
        row = {"derive_s": taken.median_s}
        with measuring("cpu") as taken:
            write_index(folder, "bench", vectors, map(Texts().read, range(COUNT)), derived=derived)
        row["save_s"] = taken.median_s
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        row["index_bytes"] = sum(sizes.values())
        row["derived_bytes"] = sum(n for name, n in sizes.items() if name.startswith("derived"))
        del vectors, derived
        times: list[float] = []
        for _ in range(ROUNDS):
            with PyTorchGPURetriever(model, device="cpu") as retriever:
                before = memory_snapshot().host.rss_bytes
                with measuring("cpu") as taken:
                    retriever.load(folder)
                times += taken.host_s
                row["resident_after_open_bytes"] = memory_snapshot().host.rss_bytes - before
        row["open_s"] = statistics.median(times)
        with PyTorchGPURetriever(model, device="cpu") as retriever:
            retriever.load(folder)
            for which in ("first_answer_s", "next_answer_s"):
                with measuring("cpu") as taken:
                    retriever.search("question")
                row[which] = taken.median_s
    for what, value in row.items():
        print(f"{what:26} {value:,.3f}" if what.endswith("_s") else f"{what:26} {value:,}")
    write("open", {"count": COUNT, "dimension": DIMENSION, **row})


if __name__ == "__main__":
    main()
