"""Retrieval quality on a judged collection: nDCG, recall and MRR, with bootstrap intervals."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rag_demo.documents.document import Document
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import SourceError
from rag_demo.vectors import Vectors

if TYPE_CHECKING:
    from rag_demo.retriever import Retriever

Ranking = Sequence[str]
_LAYOUT = "a collection has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, as in BEIR"
_RESAMPLES = 2000
_DEPTH = 101  # one more than Recall@100 needs, because the query's own document is dropped


@dataclass(frozen=True)
class JudgedCollection:
    """Documents, queries by id, and for each query the grades of the relevant documents."""

    documents: list[Document]
    queries: dict[str, str]
    judgements: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Score:
    """The mean of a metric over the queries, and its 95% bootstrap interval."""

    mean: float
    low: float
    high: float


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
    if not folder.is_dir():
        raise SourceError(f"the folder '{folder}' was not found; {_LAYOUT}")
    documents = []
    for record in _lines(folder / "corpus.jsonl"):
        title, text = record.get("title") or "", record.get("text") or ""
        documents.append(Document(str(record["_id"]), f"{title} {text}".strip(), {"title": title}))
    queries = {str(r["_id"]): str(r["text"]) for r in _lines(folder / "queries.jsonl")}
    judgements: dict[str, dict[str, int]] = {}
    path = folder / "qrels" / f"{split}.tsv"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                grades = judgements.setdefault(row["query-id"], {})
                grades[row["corpus-id"]] = int(row["score"])
    except OSError as error:
        raise SourceError(f"'{path}' cannot be read: {error.strerror}; {_LAYOUT}") from None
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise SourceError(f"'{path}' cannot be read as judgements: {error!r}; {_LAYOUT}") from None
    if missing := sorted(set(judgements) - set(queries)):
        detail = f"judges the query {missing[0]!r}, which is not in queries.jsonl"
        raise SourceError(f"'{path}' {detail}")
    if not judgements:
        raise SourceError(f"'{path}' contains no judgements")
    judged = {name: queries[name] for name in judgements}
    return JudgedCollection(documents, judged, judgements)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, each with an id of its own and a text."""
    records: dict[str, dict[str, Any]] = {}
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):  # noqa: B007  (errors name it)
                record = json.loads(line) if line.strip() else None
                if (
                    record is not None
                    and records.setdefault(str(record["_id"]), record) is not record
                ):
                    raise ValueError(f"the _id {record['_id']!r} appears twice")
                if record is not None and "text" not in record:
                    raise KeyError("text")
    except OSError as error:
        raise SourceError(f"'{path}' cannot be read: {error.strerror}; {_LAYOUT}") from None
    except (KeyError, TypeError) as error:
        raise SourceError(f'{path}:{number}: expected an object with "_id" and "text"') from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}:{number} cannot be read as JSON lines: {error}") from None
    return list(records.values())


def searching(retriever: Retriever, mode: str) -> Callable[[Sequence[str]], list[list[str]]]:
    """Return the ``search`` function for `evaluate` of a retriever in one of its modes."""

    def search(queries: Sequence[str]) -> list[list[str]]:
        found = retriever.search_batch(queries, top_k=_DEPTH, mode=mode)
        return [[result.id for result in results] for results in found]

    return search


def evaluate(
    collection: JudgedCollection, search: Callable[[Sequence[str]], Sequence[Ranking]]
) -> dict[str, Score]:
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
    try:
        import ir_measures
        from ir_measures import RR, R, ScoredDoc, nDCG
    except ImportError as error:
        raise SourceError(
            f"evaluating needs {error.name}; install it with: pip install '.[evaluate]', in a "
            "clone of torch-cleanup"
        ) from None
    metrics = {"nDCG@10": nDCG @ 10, "Recall@100": R @ 100, "MRR@10": RR @ 10}
    names = list(collection.queries)
    rankings = search(list(collection.queries.values()))
    run = [
        ScoredDoc(name, document, -float(place))
        for name, ranking in zip(names, rankings, strict=True)
        for place, document in enumerate(each for each in ranking if each != name)
    ]
    place_of = {name: place for place, name in enumerate(names)}
    values = {name: np.zeros(len(names)) for name in metrics}
    of_measure = {str(measure): name for name, measure in metrics.items()}
    for found in ir_measures.iter_calc(list(metrics.values()), collection.judgements, run):
        values[of_measure[str(found.measure)]][place_of[found.query_id]] = found.value
    chance = np.random.default_rng(0)
    samples = chance.integers(0, len(names), (_RESAMPLES, len(names)))
    scores = {}
    for metric, each in values.items():
        low, high = np.percentile(each[samples].mean(axis=1), [2.5, 97.5])
        scores[metric] = Score(float(each.mean()), float(low), float(high))
    return scores
