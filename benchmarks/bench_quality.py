"""Measure search quality on judged questions: by vectors, by words and by both.

The questions are a collection in BEIR's layout, or those about docs/ in benchmarks/questions.
"""

from __future__ import annotations

import argparse
import csv
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.results_file import write
from rag_demo import Document, EmbeddingModel, PyTorchGPURetriever, searching
from rag_demo.commands.evaluate import Judgements, quality, read_queries
from rag_demo.reading.sources import Reading, Skipped, read_source

ROOT = Path(__file__).resolve().parent.parent
CONSTANTS = (2, 5, 10, 20, 60)  # of the fusion of ranks


def read_docs() -> tuple[list[Document], dict[str, str], Judgements]:
    """Read docs/, and the questions. Relevant are the passages of the section that answers one."""
    documents = list(read_source(str(ROOT / "docs"), Skipped(), Reading(include=("*.md",))))
    queries: dict[str, str] = {}
    judgements: Judgements = {}
    with (ROOT / "benchmarks/questions/docs.tsv").open(encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)):
            name = f"question {number}"
            queries[name] = row["question"]
            judgements[name] = {
                each.id: 1
                for each in documents
                if each.metadata["source"] == row["page"]
                and row["section"] in each.metadata.get("title", "").split(" > ")
            }
            if not judgements[name]:
                raise SystemExit(f"{row['page']} has no section {row['section']!r}")
    return documents, queries, judgements


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beir", type=Path, help="a collection; by default docs/")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--passages", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    if options.beir is None:
        name, (documents, queries, judgements) = "docs", read_docs()
    else:
        name = options.beir.name
        documents = list(read_source(f"{options.beir}/corpus.jsonl", Skipped()))
        queries, judgements = read_queries(options.beir)
    rows: dict[str, Any] = {}
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

        def measure(mode: str) -> dict[str, dict[str, float]]:
            scores = quality(queries, judgements, retriever, mode=mode)
            return {metric: {"mean": score} for metric, score in scores.items()}

        for mode in searching.MODES:
            rows[mode] = measure(mode)
        usual = searching.RANK_CONSTANT
        constants = {}
        for searching.RANK_CONSTANT in CONSTANTS:
            constants[str(searching.RANK_CONSTANT)] = measure("hybrid")
        searching.RANK_CONSTANT = usual
    write(
        f"quality_{name}",
        {
            "dtype": options.dtype,
            "passages": options.passages,
            "questions": len(queries),
            "modes": rows,
            "hybrid by the constant of its ranks": constants,
        },
    )


if __name__ == "__main__":
    main()
