"""Measure search quality on a collection in BEIR's layout: by vectors, by words and by both."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.results_file import write
from rag_demo import EmbeddingModel, PyTorchGPURetriever
from rag_demo.commands.evaluate import quality, read_queries
from rag_demo.reading.sources import Skipped, read_source
from rag_demo.searching import MODES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beir", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--passages", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    documents = list(read_source(f"{options.beir}/corpus.jsonl", Skipped()))
    queries, judgements = read_queries(options.beir)
    rows = {}
    with (
        EmbeddingModel(dtype=options.dtype) as model,
        PyTorchGPURetriever(model) as retriever,
    ):
        retriever.add(
            [document.text for document in documents],
            [document.metadata for document in documents],
            [document.id for document in documents],
            passages=options.passages,
        )
        for mode in MODES:
            scores = quality(queries, judgements, retriever, mode)
            rows[mode] = {metric: {"mean": score} for metric, score in scores.items()}
    write(
        f"quality_{options.beir.name}",
        {
            "dtype": options.dtype,
            "passages": options.passages,
            "questions": len(queries),
            "modes": rows,
        },
    )


if __name__ == "__main__":
    main()
