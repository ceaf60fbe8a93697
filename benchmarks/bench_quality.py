"""Measure search quality on a collection in BEIR's layout: by vectors, by words and by both."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.results_file import write
from rag_demo import EmbeddingModel, PyTorchGPURetriever
from rag_demo.evaluate import evaluate, read_beir
from rag_demo.searching.arguments import MODES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beir", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--passages", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    collection = read_beir(options.beir)
    rows = {}
    with (
        EmbeddingModel(dtype=options.dtype) as model,
        PyTorchGPURetriever(model) as retriever,
    ):
        retriever.add(
            [document.text for document in collection.documents],
            [document.metadata for document in collection.documents],
            [document.id for document in collection.documents],
            passages=options.passages,
        )
        for mode in MODES:
            scores = evaluate(collection, retriever, mode)
            print(f"{options.beir.name}, {mode}: {scores}")
            rows[mode] = {metric: {"mean": score} for metric, score in scores.items()}
    questions = len(collection.queries)
    write(
        f"quality_{options.beir.name}",
        {
            "dtype": options.dtype,
            "passages": options.passages,
            "questions": questions,
            "modes": rows,
        },
    )


if __name__ == "__main__":
    main()
