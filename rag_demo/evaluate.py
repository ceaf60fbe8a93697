"""Quality on a collection with judgements: nDCG, recall, MRR, with bootstrap intervals."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rag_demo.documents.document import Document
from rag_demo.errors import SourceError
from rag_demo.vectors import Vectors

if TYPE_CHECKING:
    from rag_demo.retriever import Retriever

__all__ = [
    "JudgedCollection",
    "NoEmbeddings",
    "Score",
    "evaluate",
    "read_beir",
    "searching",
]

Ranking = Sequence[str]
_LAYOUT = "a collection has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, as those of BEIR"
_RESAMPLES = 2000
_DEPTH = 101  # of what is asked for: one more than counts, for the question's own document


@dataclass(frozen=True)
class JudgedCollection:
    """Documents, questions by id, and for each question the relevant documents' grades."""

    documents: list[Document]
    questions: dict[str, str]
    judgements: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Score:
    """The mean of a metric over the questions, and its 95% interval by bootstrap."""

    mean: float
    low: float
    high: float


class NoEmbeddings:
    """Stands in for a model where only words are compared: every vector is the same number."""

    name = "none"
    dimension = 1

    def embed_query(self, text: str) -> Vectors:
        """Return a vector: shape (1,)."""
        return np.ones(1, np.float32)

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        """Return vectors: shape (n, 1)."""
        return np.ones((len(texts), 1), np.float32)


def read_beir(folder: Path, split: str = "test") -> JudgedCollection:
    """Read a collection in the layout of BEIR; questions without judgements are left out.

    Raises:
        SourceError: A file is missing, or a line is not what it should be.
    """
    if not folder.is_dir():
        raise SourceError(f"the folder '{folder}' was not found; {_LAYOUT}")
    documents = []
    for record in _lines(folder / "corpus.jsonl"):
        title, text = record.get("title") or "", record.get("text") or ""
        documents.append(Document(str(record["_id"]), f"{title} {text}".strip(), {"title": title}))
    questions = {str(r["_id"]): str(r["text"]) for r in _lines(folder / "queries.jsonl")}
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
    missing = sorted(set(judgements) - set(questions))
    if missing or not judgements:
        what = f"the question {missing[0]!r}, which is not there" if missing else "nothing"
        raise SourceError(f"'{path}' judges {what}")
    asked = {name: questions[name] for name in judgements}
    return JudgedCollection(documents, asked, judgements)


def _lines(path: Path) -> list[dict[str, Any]]:
    records: dict[str, dict[str, Any]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict) or "_id" not in record or "text" not in record:
                    raise SourceError(f'{path}:{number}: expected an object with "_id" and "text"')
                if str(record["_id"]) in records:
                    raise SourceError(f"{path}:{number}: the _id {record['_id']!r} stands twice")
                records[str(record["_id"])] = record
    except OSError as error:
        raise SourceError(f"'{path}' cannot be read: {error.strerror}; {_LAYOUT}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"'{path}' cannot be read as JSON lines: {error}") from None
    return list(records.values())


def searching(retriever: Retriever, mode: str) -> Callable[[Sequence[str]], list[list[str]]]:
    """Make the ``search`` that `evaluate` takes of a retriever, in one of its modes."""

    def search(questions: Sequence[str]) -> list[list[str]]:
        answers = retriever.search_batch(questions, top_k=_DEPTH, mode=mode)
        return [[result.id for result in results] for results in answers]

    return search


def evaluate(
    collection: JudgedCollection, search: Callable[[Sequence[str]], Sequence[Ranking]]
) -> dict[str, Score]:
    """Ask all questions, and average the metrics.

    A document with the id of the question is left out of its answers, as BEIR does it: in
    some collections (ArguAna, Quora) questions are documents.

    Args:
        collection: What to ask, and what the answers are.
        search: Returns, for each question, at least 101 ids of documents, the best first.
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
    names = list(collection.questions)
    rankings = search([collection.questions[name] for name in names])
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
