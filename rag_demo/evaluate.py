"""Retrieval quality on a judged collection: nDCG, recall and MRR."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rag_demo.documents.document import Document
from rag_demo.documents.json_lines import read_json_lines
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import SourceError, required
from rag_demo.vectors import Vectors

if TYPE_CHECKING:
    from rag_demo.retriever import Retriever

Ranking = Sequence[str]
_LAYOUT = "a collection has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, as in BEIR"
_DEPTH = 101  # one more than Recall@100 needs, because the query's own document is dropped


@dataclass(frozen=True)
class JudgedCollection:
    """Documents, queries by id, and for each query the grades of the relevant documents."""

    documents: list[Document]
    queries: dict[str, str]
    judgements: dict[str, dict[str, int]]


class NoEmbeddings:
    """A stand-in for a model when only the full text is searched: all vectors are equal.

    Args:
        identity: The model of the index that is searched.
    """

    name = "none"
    dimension = 1

    def __init__(self, identity: ModelIdentity | None = None) -> None:
        self.identity = identity

    def embed_query(self, text: str) -> Vectors:
        """Return a vector: shape (1,)."""
        return np.ones(1, np.float32)

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Return vectors: shape (n, 1)."""
        return np.ones((len(texts), 1), np.float32)


def read_beir(folder: Path, split: str = "test") -> JudgedCollection:
    """Read a collection in BEIR's layout. Queries without judgements are left out.

    Raises:
        SourceError: A file is missing, or a line is invalid.
    """
    documents = _documents(folder / "corpus.jsonl")
    queries = {each.id: each.text for each in _documents(folder / "queries.jsonl")}
    judgements: dict[str, dict[str, int]] = {}
    path = folder / "qrels" / f"{split}.tsv"
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


def _documents(path: Path) -> list[Document]:
    found = []
    try:
        with path.open("rb") as file:
            for number, document in read_json_lines(file, name=path.name):
                if isinstance(document, str):
                    raise SourceError(f"'{path}:{number}': {document}")
                found.append(document)
    except OSError as error:
        raise SourceError(f"'{path}' cannot be read: {error.strerror}; {_LAYOUT}") from None
    return found


def searching(retriever: Retriever, mode: str) -> Callable[[Sequence[str]], list[list[str]]]:
    """Return the ``search`` function for `evaluate` of a retriever in one of its modes."""

    def search(queries: Sequence[str]) -> list[list[str]]:
        found = retriever.search_batch(queries, top_k=_DEPTH, mode=mode)
        return [[result.id for result in results] for results in found]

    return search


def evaluate(
    collection: JudgedCollection, search: Callable[[Sequence[str]], Sequence[Ranking]]
) -> dict[str, float]:
    """Search for all queries, and average the metrics.

    As in BEIR, a document with the id of the query is dropped from its results, because in some
    collections (ArguAna, Quora) queries are documents.

    Args:
        collection: The collection.
        search: Returns at least 101 document ids for each query, the best first.

    Returns:
        The scores by the name of the metric.

    Raises:
        SourceError: ir-measures is not installed.
    """
    with required("evaluating", SourceError, "evaluate"):
        from ir_measures import RR, R, ScoredDoc, calc_aggregate, nDCG
    rankings = search(list(collection.queries.values()))
    run = [
        ScoredDoc(name, document, -float(place))
        for name, ranking in zip(collection.queries, rankings, strict=True)
        for place, document in enumerate(each for each in ranking if each != name)
    ]
    metrics = {"nDCG@10": nDCG @ 10, "Recall@100": R @ 100, "MRR@10": RR @ 10}
    scores = calc_aggregate(list(metrics.values()), collection.judgements, run)
    return {name: float(scores[metric]) for name, metric in metrics.items()}
