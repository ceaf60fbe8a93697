"""Retrieval quality on a judged collection: nDCG, recall and MRR."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rag_demo.documents.sources import Document, Skipped, read_source
from rag_demo.errors import SourceError, required

if TYPE_CHECKING:
    from rag_demo.retriever import Retriever

_LAYOUT = "a collection has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, as in BEIR"
_DEPTH = 101  # one more than Recall@100 needs, because the query's own document is dropped


class JudgedCollection(NamedTuple):
    """Documents, queries by id, and for each query the grades of the relevant documents."""

    documents: list[Document]
    queries: dict[str, str]
    judgements: dict[str, dict[str, int]]


def read_beir(folder: Path, split: str = "test") -> JudgedCollection:
    """Read a collection in BEIR's layout. Queries without judgements are left out.

    Raises:
        SourceError: A file is missing, or a line is invalid.
    """
    corpus, path = folder / "corpus.jsonl", folder / "qrels" / f"{split}.tsv"
    if not corpus.is_file():
        raise SourceError(f"'{corpus}' cannot be read; {_LAYOUT}")
    documents = list(read_source(str(corpus), Skipped()))
    if not documents:
        raise SourceError(f"'{corpus}' contains no documents")
    queries = {each.id: each.text for each in read_source(f"{folder}/queries.jsonl", Skipped())}
    judgements: dict[str, dict[str, int]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                grades = judgements.setdefault(row["query-id"], {})
                grades[row["corpus-id"]] = int(row["score"])
        judged = {name: queries[name] for name in judgements}
    except OSError as error:
        raise SourceError(f"'{path}' cannot be read: {error.strerror}; {_LAYOUT}") from None
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise SourceError(f"'{path}' has wrong judgements or unknown queries: {error!r}") from None
    if not judgements:
        raise SourceError(f"'{path}' contains no judgements")
    return JudgedCollection(documents, judged, judgements)


def evaluate(collection: JudgedCollection, retriever: Retriever, mode: str) -> dict[str, float]:
    """Search for all queries, and average the metrics.

    As in BEIR, a document with the id of the query is dropped from its results, because in some
    collections (ArguAna, Quora) queries are documents.

    Returns:
        The scores by the name of the metric.

    Raises:
        SourceError: ir-measures is not installed.
    """
    with required("evaluating", SourceError, "evaluate"):
        from ir_measures import RR, R, ScoredDoc, calc_aggregate, nDCG
    found = retriever.search_batch(list(collection.queries.values()), top_k=_DEPTH, mode=mode)
    run = [
        ScoredDoc(name, result.id, -float(result.rank))
        for name, results in zip(collection.queries, found, strict=True)
        for result in results
        if result.id != name
    ]
    metrics = {"nDCG@10": nDCG @ 10, "Recall@100": R @ 100, "MRR@10": RR @ 10}
    scores = calc_aggregate(list(metrics.values()), collection.judgements, run)
    return {name: float(scores[metric]) for name, metric in metrics.items()}
