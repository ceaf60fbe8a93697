"""Requests and results of searches, checks of arguments, and the fusion of two rankings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rag_demo.errors import InvalidValueError, check_positive, checked_texts, short_repr
from rag_demo.reading.document import Document, checked_metadata
from rag_demo.reading.passages import PASSAGE_CHARS
from rag_demo.vectors import Rows, Vectors

MODES = ("dense", "bm25", "hybrid")
# Of a hybrid search: Cormack, Clarke and Buettcher, SIGIR 2009. They have 60, which lifts what is
# mediocre in both rankings; benchmarks/bench_quality.py compares some.
RANK_CONSTANT = 5
RERANKED = 5  # times as many results are reranked as are wanted
_FUSED_FROM = 100  # of each ranking

Order = Callable[[Rows], Rows]
"""Returns numbers that order documents by id, for documents that tie."""

Hit = TypeVar("Hit", bound=Any)


class SearchRequest(NamedTuple):
    """A request to a `rag_demo.Store`.

    Attributes:
        texts: The queries.
        vectors: Their vectors: shape (b, d), each of length 1; None in the mode "bm25".
        where: The filter that documents must match, a `rag_demo.stores.filters.Where`, or None.
        top_k: How many results at most, of each query.
        mode: "dense", "bm25" or "hybrid"; see `rag_demo.Retriever.search`.
        weights: Of the ranks by vectors and by words in the mode "hybrid".
    """

    texts: Sequence[str]
    vectors: Vectors | None
    where: Any
    top_k: int
    mode: str
    weights: tuple[float, float]


class SearchResult(NamedTuple):
    """One answer.

    Attributes:
        rank: 1 for the best.
        score: The cosine similarity to the query, from -1 to 1; in the mode "bm25" the BM25
            score; in the mode "hybrid" a sum of reciprocal ranks; after reranking, that of the
            reranker.
        id: The document's id.
        text: The document's text.
        metadata: A copy of the document's metadata.
        passage: Start and stop of the best passage in the text: the nearest one, or for a result
            of the mode "bm25", the one with most of the words. None if the document has no
            passages or the whole text scored higher.
        scores: What the score was made from: "dense" is the cosine and "bm25" the BM25 score. In
            the mode "hybrid", "bm25" is missing if the search by words did not find the document.
    """

    rank: int
    score: float
    id: str
    text: str
    metadata: Mapping[str, Any] = MappingProxyType({})  # All results share the default.
    passage: tuple[int, int] | None = None
    scores: Mapping[str, float] = MappingProxyType({})

    @property
    def passage_text(self) -> str:
        """The text of the passage, or the whole text without one."""
        return self.text[slice(*(self.passage or (None,)))]


@dataclass(frozen=True)
class Stats:
    """The size of a retriever.

    Attributes:
        size: How many documents there are.
        dimension: Length of the vectors; 0 without documents.
        device: The device that searches.
        dtype: The dtype that is searched.
        nbytes: Bytes of the vectors, of their rounded copies and of mapped files.
    """

    size: int
    dimension: int
    device: str
    dtype: str
    nbytes: int


def check_documents(texts: Any, metadata: Any, ids: Any) -> list[Document]:
    """Check and copy the arguments of `rag_demo.Retriever.add`. Without ids, they are empty.

    Raises:
        TypeError: A text or an id is not str, or metadata are not JSON.
        ValueError: Lengths differ, or an id is repeated.
    """
    if isinstance(metadata, Mapping):
        raise TypeError("metadata must be a list with one mapping for each text, got one mapping")
    names = None if ids is None else checked_texts(ids, "ids")
    texts, metadata = checked_texts(texts, "texts"), None if metadata is None else list(metadata)
    for what, values in (("metadata", metadata), ("ids", names)):
        if values is not None and len(values) != len(texts):
            raise ValueError(f"got {len(texts)} texts but {len(values)} {what}; pass one for each")
    if names is not None and len(set(names)) < len(names):
        ((repeated, _),) = Counter(names).most_common(1)
        raise ValueError(f"the id {short_repr(repeated)} appears twice; ids must differ")
    known: Sequence[Mapping[str, Any]] = [{}] * len(texts) if metadata is None else metadata
    plain = [
        checked_metadata(each, f"text {number}" if names is None else short_repr(names[number]))
        for number, each in enumerate(known)
    ]
    return list(map(Document, names or [""] * len(texts), texts, plain))


def check_chunks(size: Any, overlap: Any) -> None:
    """Check the size and the overlap of passages.

    Raises:
        TypeError: The size is not a whole number.
        ValueError: The size is not positive, or the overlap is not smaller than the size.
    """
    check_positive("chunk_size", size)
    if type(overlap) is not int or not 0 <= overlap < (size or PASSAGE_CHARS):
        raise ValueError(
            f"chunk_overlap must be 0 or more and below chunk_size, got {short_repr(overlap)}"
        )


def check_search(
    queries: Any, top_k: Any, min_score: Any, mode: Any, weights: Any
) -> tuple[list[str], tuple[float, float]]:
    """Check the arguments of `rag_demo.Retriever.search_batch`; return the queries and weights.

    Raises:
        TypeError: A query is not str, ``min_score`` is not a number, or the weights are not two.
        InvalidValueError: ``top_k`` is not positive, or the mode is unknown. A weight is negative
            or not finite, or both are 0. Or ``min_score`` is higher than all scores of a hybrid
            search.
    """
    if isinstance(top_k, bool) or not isinstance(top_k, (int, np.integer)) or top_k < 1:
        raise InvalidValueError(f"top_k must be a positive whole number, got {short_repr(top_k)}")
    numbers = (int, float, np.integer, np.floating, type(None))
    if not isinstance(min_score, numbers) or min_score != min_score:
        raise TypeError(f"min_score must be a number, got {short_repr(min_score)}")
    if mode not in MODES:
        raise InvalidValueError(f"mode must be one of {', '.join(MODES)}, got {short_repr(mode)}")
    try:
        dense, words = map(float, weights)
    except (TypeError, ValueError):
        raise TypeError(f"weights must be two numbers, got {short_repr(weights)}") from None
    if not (0 <= dense < math.inf and 0 <= words < math.inf and dense + words):
        raise InvalidValueError(
            f"weights must be finite and not negative, one above 0, got {weights}"
        )
    highest = (dense + words) / (RANK_CONSTANT + 1)
    if mode == "hybrid" and min_score is not None and min_score > highest:
        raise InvalidValueError(
            f"min_score is {short_repr(min_score)}, but scores of the mode 'hybrid' end at "
            f"{highest:.4f}; use mode='dense', whose scores are cosines"
        )
    return checked_texts(queries, "queries"), (dense, words)


def by_mode(
    request: SearchRequest,
    search: Callable[[str, int], list[list[Hit]]],
    nearest: Callable[[list[tuple[int, Any]]], list[Hit]],
    order_of: Callable[[list[Any]], Iterable[Any]] = list,
) -> list[list[Hit]]:
    """Search by vectors or by words, or by both, and fuse the two rankings of each query.

    The fused score of a document is the sum of weight / (RANK_CONSTANT + rank) over the rankings. A
    ranking with the weight 0 adds no documents.

    Args:
        request: The queries.
        search: Takes "dense" or "bm25", and how many results are wanted of each query. It returns
            named tuples with an ``id``, a ``score`` and ``scores``, the best first.
        nearest: Takes pairs of a query's number and an id, and returns what a search by vectors
            would: a result for each, with the cosine and the best passage.
        order_of: Returns what orders documents that tie, for a list of ids.
    """
    top_k = request.top_k
    if request.mode != "hybrid":
        return search(request.mode, top_k)
    depth = max(top_k, _FUSED_FROM)
    near, worded = (
        [{hit.id: hit for hit in hits} for hits in search(part, depth)]
        for part in ("dense", "bm25")
    )
    fused = []
    for rankings in zip(near, worded, strict=True):
        scores: dict[Any, float] = {}
        for ids, weight in zip(rankings, request.weights, strict=True):
            for place, name in enumerate(ids if weight else (), start=RANK_CONSTANT + 1):
                scores[name] = scores.get(name, 0.0) + weight / place
        least = min(sorted(scores.values(), reverse=True)[:top_k], default=0.0)
        names = [name for name in scores if scores[name] >= least]
        places = dict(zip(names, order_of(names), strict=True))
        names.sort(key=lambda name: (-scores[name], places[name]))
        fused.append({name: scores[name] for name in names[:top_k]})
    lacking = [(n, name) for n, best in enumerate(fused) for name in best if name not in near[n]]
    for (n, name), hit in zip(lacking, nearest(lacking) if lacking else (), strict=True):
        near[n][name] = hit
    answers: list[list[Hit]] = [[] for _ in fused]
    for n, best in enumerate(fused):
        for name, score in best.items():
            parts = {"dense": near[n][name].score}
            if name in worded[n]:
                parts["bm25"] = worded[n][name].score
            answers[n].append(near[n][name]._replace(score=score, scores=parts))
    return answers
