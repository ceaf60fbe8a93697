"""``rag-demo evaluate`` measures retrieval quality; ``rag-demo demo`` searches Markdown files."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rag_demo.commands import options
from rag_demo.errors import SourceError, required
from rag_demo.reading.sources import Reading, Skipped, read_source

if TYPE_CHECKING:
    from rag_demo.retriever import Retriever

_LAYOUT = "a collection has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, as in BEIR"
_DEPTH = 101  # one more than Recall@100 needs, because the query's own document is dropped

Judgements = dict[str, dict[str, int]]
"""For each query the grades of the relevant documents."""


@click.command()
@click.argument("folder", metavar="PATH", type=click.Path(path_type=Path, exists=True))
@options.place_option("--index", "place", required=True, help="Index of PATH.")
@options.mode_option
@options.rerank_option
@options.weights_option
@click.option("--split", default="test", help="Read judgements from qrels/SPLIT.tsv.")
@options.made_by_option
@options.trust_option
@options.device_option
def evaluate(
    folder: Path,
    place: Any,
    mode: str | None,
    rerank: str | None,
    weights: tuple[float, float],
    split: str,
    **model: Any,
) -> None:
    """Measure retrieval quality of an index on the judged collection in PATH.

    The collection has BEIR's layout. rag-demo index PATH/corpus.jsonl makes the index.
    """
    mode, (queries, judgements) = mode or "hybrid", read_queries(folder, split)
    with contextlib.ExitStack() as stack:
        retriever = options.open_retriever(stack, place, mode, **model)
        reranker = options.open_reranker(stack, rerank, device=model["device"])
        scores = quality(
            queries, judgements, retriever, mode=mode, weights=weights, rerank=reranker
        )
        judged = sorted({name for grades in judgements.values() for name in grades})
        if not any(retriever.get(judged)):
            options.warn(f"{place} has none of the judged documents of {folder}")
    options.say(f"{folder.name}, {mode}, {len(queries)} questions")
    for metric, score in scores.items():
        options.say(f"{metric:12} {score:.4f}")


def read_queries(folder: Path, split: str = "test") -> tuple[dict[str, str], Judgements]:
    """Read the queries that are judged, by id, and the judgements.

    Raises:
        SourceError: A file is missing, or a line is invalid.
    """
    path = folder / "qrels" / f"{split}.tsv"
    queries = {each.id: each.text for each in read_source(f"{folder}/queries.jsonl", Skipped())}
    judgements: Judgements = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                grades = judgements.setdefault(row["query-id"], {})
                grades[row["corpus-id"]] = int(row["score"])
        if not judgements:
            raise ValueError("it has no judgements")
        return {name: queries[name] for name in judgements}, judgements
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        what = f"'{path}' cannot be read, or has wrong judgements or unknown queries"
        raise SourceError(f"{what} ({error!r}); {_LAYOUT}") from None


def quality(
    queries: dict[str, str], judgements: Judgements, retriever: Retriever, **search: Any
) -> dict[str, float]:
    """Search for all queries, with options of `Retriever.search_batch`, and average the metrics.

    As in BEIR, a document with the id of the query is dropped from its results, because in some
    collections (ArguAna, Quora) queries are documents.

    Returns:
        The scores by the name of the metric.

    Raises:
        SourceError: ir-measures is not installed.
    """
    with required("evaluating", SourceError, "evaluate"):
        from ir_measures import RR, R, ScoredDoc, calc_aggregate, nDCG
    found = retriever.search_batch(list(queries.values()), top_k=_DEPTH, **search)
    run = [
        ScoredDoc(name, result.id, -float(result.rank))
        for name, results in zip(queries, found, strict=True)
        for result in results
        if result.id != name
    ]
    metrics = {"nDCG@10": nDCG @ 10, "Recall@100": R @ 100, "MRR@10": RR @ 10}
    scores = calc_aggregate(list(metrics.values()), judgements, run)
    return {name: float(scores[metric]) for name, metric in metrics.items()}


QUESTIONS = (
    "how do I give cached GPU memory back?",
    "how do I keep a model loaded between requests?",
    "how do I save an index to a folder?",
)


@click.command()
@click.argument("folder", default=".")
@click.argument("questions", nargs=-1, metavar="[QUESTION]...")
@options.top_k_option
def demo(folder: str, questions: tuple[str, ...], top_k: int) -> None:
    """Search the Markdown files of FOLDER, and show what the release of the model gives back.

    By default, the current folder. The default questions are about the folder docs of a clone.
    """
    from rag_demo.embedding_model import EmbeddingModel
    from rag_demo.pytorch_gpu_retriever import PyTorchGPURetriever
    from torch_utils import SafePyTorchCleanup

    documents = list(read_source(folder, Skipped(), Reading(include=("*.md",))))
    if not documents:
        raise SourceError(f"'{folder}' has no Markdown files; name a folder that has some")
    options.say(f"indexing {len(documents)} passages of {folder} ...")
    with SafePyTorchCleanup() as scope:
        embedder = scope.manage(EmbeddingModel())
        retriever = scope.manage(PyTorchGPURetriever(embedder))
        with options.progress("embedding", len(documents)) as advance:
            ids, texts, metadata, _ = zip(*documents, strict=True)
            retriever.add(texts, metadata, ids, on_progress=advance)
        for question in questions or QUESTIONS:
            found = retriever.search(question, top_k=top_k)
            options.print_results(question, found, with_query=True)
    options.say(f"model and index released: {scope.report}")
