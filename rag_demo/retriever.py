"""The Retriever interface: texts in, the nearest of them out, by exact cosine similarity."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rag_demo.index import SavedIndex, read_index, write_index
from torch_utils import Resource

__all__ = ["Embedder", "Retriever", "SearchResult", "Where"]

Vectors = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Where = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool]
"""A filter: wanted values by key (a set or list: any of them), or a function of the metadata."""


class Embedder(Protocol):
    """What a retriever needs of an embedding model; ``embed_queries`` is used if it is there."""

    @property
    def dimension(self) -> int:
        """Length of its vectors."""

    def embed_query(self, text: str) -> Any:
        """Embed one question: shape (d,)."""

    def embed_documents(self, texts: Sequence[str]) -> Any:
        """Embed documents: shape (n, d)."""


@dataclass(frozen=True)
class SearchResult:
    """One answer.

    Attributes:
        rank: 1 for the best.
        score: Cosine similarity to the question, from -1 to 1.
        id: The document's id.
        text: The document.
        metadata: What was given with it.
    """

    rank: int
    score: float
    id: str
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Retriever(Resource, ABC):
    """Exact cosine search over texts; a subclass keeps the vectors.

    Results are ordered by score, equal scores by id. Filters are applied inside the search:
    asking for five gives five wherever five match. Closed at exit at the latest. Threads: one
    operation at a time; the embedding model, which it does not own, works outside the lock.

    Args:
        embedding_model: An `EmbeddingModel`, or anything else that is an `Embedder`.
    """

    def __init__(self, embedding_model: Embedder) -> None:
        self.embedding_model = embedding_model
        self._ids: list[str] = []
        self._texts: list[str] = []
        self._metadata: list[Mapping[str, Any]] = []
        self._row_of: dict[str, int] = {}
        self._next_id = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._ids)

    def add(
        self,
        texts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]] | None = None,
        ids: Sequence[str] | None = None,
        *,
        on_progress: Callable[[int], object] | None = None,
    ) -> list[str]:
        """Add documents; one whose id is there already replaces the old one.

        Args:
            texts: The documents.
            metadata: A mapping for each, to filter by and to get back; JSON values.
            ids: A name for each; by default "0", "1", ...
            on_progress: See `EmbeddingModel.embed_documents`; only for models that take it.

        Returns:
            The ids.

        Raises:
            ValueError: Lengths differ, an id stands twice, or a vector of the model is zero or
                not finite. Nothing was added.
            ResourceClosedError: This retriever is closed.
        """
        self.ensure_open()
        if isinstance(texts, str):
            raise TypeError("add() takes a sequence of texts, not one text")
        for what, given in (("metadata", metadata), ("ids", ids)):
            if given is not None and len(given) != len(texts):
                raise ValueError(f"{len(texts)} texts but {len(given)} {what}: one for each")
        if ids is not None and len(set(ids)) != len(ids):
            twice = next(name for name in ids if list(ids).count(name) > 1)
            raise ValueError(f"the id {twice!r} stands twice: ids must differ")
        if not texts:
            return []
        options = {} if on_progress is None else {"on_progress": on_progress}
        vectors = normalized(self.embedding_model.embed_documents(list(texts), **options))
        if len(vectors) != len(texts):
            raise ValueError(f"the model made {len(vectors)} vectors of {len(texts)} texts")
        with self._lock:
            self.ensure_open()
            if len(self) and vectors.shape[1] != self._dimension():
                raise ValueError(
                    f"the model's vectors have {vectors.shape[1]} dimensions, "
                    f"those already here {self._dimension()}"
                )
            names = [str(name) for name in ids] if ids is not None else self._new_ids(len(texts))
            self.delete([name for name in names if name in self._row_of])
            self._append(vectors)
            self._remember(names, texts, metadata or [{}] * len(texts))
            return names

    def delete(self, ids: Sequence[str]) -> int:
        """Remove documents; ids that are not there are passed over.

        Returns:
            How many were removed.
        """
        if isinstance(ids, str):
            raise TypeError("delete() takes a sequence of ids, not one id")
        with self._lock:
            self.ensure_open()
            gone = {self._row_of[name] for name in map(str, ids) if name in self._row_of}
            if gone:
                kept = [row for row in range(len(self)) if row not in gone]
                self._keep(np.asarray(kept, np.int64))
                self._ids = [self._ids[row] for row in kept]
                self._texts = [self._texts[row] for row in kept]
                self._metadata = [self._metadata[row] for row in kept]
                self._row_of = {name: row for row, name in enumerate(self._ids)}
            return len(gone)

    def search(
        self,
        query: str,
        top_k: int = 5,
        min_score: float | None = None,
        where: Where | None = None,
    ) -> list[SearchResult]:
        """Find the documents nearest to a question.

        Args:
            query: The question.
            top_k: How many at most.
            min_score: Leave out what scores lower.
            where: Search only among documents whose metadata match.

        Raises:
            ValueError: ``top_k`` is not positive.
            ResourceClosedError: This retriever, or its embedding model, is closed.
        """
        return self.search_batch([query], top_k, min_score, where)[0]

    def search_batch(
        self,
        queries: Sequence[str],
        top_k: int = 5,
        min_score: float | None = None,
        where: Where | None = None,
    ) -> list[list[SearchResult]]:
        """Find the documents nearest to each of several questions; see `search`."""
        self.ensure_open()
        if isinstance(queries, str):
            raise TypeError("search_batch() takes a sequence of questions, not one; use search()")
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ValueError(f"top_k must be a positive whole number, not {top_k!r}")
        if not len(self) or not queries:
            return [[] for _ in queries]
        vectors = self._embed_queries(queries)
        with self._lock:
            self.ensure_open()
            rows = None if where is None else self._matching(where)
            if rows is not None and not len(rows):
                return [[] for _ in queries]
            available = len(self) if rows is None else len(rows)
            found = self._candidates(vectors, min(top_k, available), rows)
            return [
                self._results(vector, candidates, top_k, min_score)
                for vector, candidates in zip(vectors, found, strict=True)
            ]

    def save(self, path: str | Path) -> None:
        """Save the index into a folder, replacing one that is there only when all is written.

        Raises:
            IndexFileError: The folder holds something else, or cannot be written.
        """
        with self._lock:
            self.ensure_open()
            write_index(
                Path(path),
                SavedIndex(
                    model=model_name(self.embedding_model),
                    vectors=self._vectors(),
                    ids=self._ids,
                    texts=self._texts,
                    metadata=self._metadata,
                ),
            )

    def load(self, path: str | Path) -> int:
        """Load a saved index in place of what is here.

        Returns:
            How many documents it holds.

        Raises:
            IndexFileError: It is missing or damaged; what was here stays.
            ModelMismatchError: It was made with another embedding model.
        """
        self.ensure_open()
        saved = read_index(Path(path), expected_model=model_name(self.embedding_model))
        with self._lock:
            self.ensure_open()
            self._clear()
            self._ids, self._texts, self._metadata, self._row_of = [], [], [], {}
            if len(saved.ids):
                self._append(saved.vectors)
            self._remember(saved.ids, saved.texts, saved.metadata)
            return len(self)

    def _remember(
        self, ids: Sequence[str], texts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> None:
        self._row_of.update((name, row) for row, name in enumerate(ids, start=len(self._ids)))
        self._ids.extend(ids)
        self._texts.extend(texts)
        self._metadata.extend(dict(entry) for entry in metadata)

    def _new_ids(self, count: int) -> list[str]:
        names: list[str] = []
        while len(names) < count:
            if str(self._next_id) not in self._row_of:
                names.append(str(self._next_id))
            self._next_id += 1
        return names

    def _embed_queries(self, queries: Sequence[str]) -> Vectors:
        embed_queries = getattr(self.embedding_model, "embed_queries", None)
        if embed_queries is not None:
            return normalized(embed_queries(list(queries)))
        return normalized([self.embedding_model.embed_query(query) for query in queries])

    def _matching(self, where: Where) -> Rows:
        matches = _predicate(where)
        rows = [row for row, metadata in enumerate(self._metadata) if matches(metadata)]
        return np.asarray(rows, np.int64)

    def _results(
        self, query: Vectors, candidates: Rows, top_k: int, min_score: float | None
    ) -> list[SearchResult]:
        """Score the candidates again, each by itself and in float64.

        How a matrix product rounds depends on its shape and on the count of threads; this does
        not, so neither do scores, ties and the order of the answers.
        """
        vectors = self._vectors(candidates).astype(np.float64)
        scores = (vectors * query.astype(np.float64)).sum(axis=1)
        hits = zip(scores.tolist(), candidates.tolist(), strict=True)
        best = sorted(hits, key=self._order)[:top_k]
        return [
            SearchResult(rank, score, self._ids[row], self._texts[row], self._metadata[row])
            for rank, (score, row) in enumerate(best, start=1)
            if min_score is None or score >= min_score
        ]

    def _order(self, hit: tuple[float, int]) -> tuple[float, str]:
        return -hit[0], self._ids[hit[1]]

    def _dimension(self) -> int:
        return int(self._vectors().shape[1])

    @abstractmethod
    def _append(self, vectors: Vectors) -> None:
        """Put vectors, of length 1, behind those that are there: shape (n, d)."""

    @abstractmethod
    def _keep(self, rows: Rows) -> None:
        """Keep only these rows, in this order."""

    @abstractmethod
    def _clear(self) -> None:
        """Drop all vectors."""

    @abstractmethod
    def _vectors(self, rows: Rows | None = None) -> Vectors:
        """Return these vectors, by default all: shape (n, d)."""

    @abstractmethod
    def _candidates(self, queries: Vectors, top_k: int, rows: Rows | None) -> list[Rows]:
        """For each query, the rows of the ``top_k`` best, and of all that might tie with them.

        That is every row whose float32 score is at most `rounding` below the k-th best one.

        Args:
            queries: Shape (b, d), each of length 1.
            top_k: At most as many as there are.
            rows: Look only at these; None for all.
        """


def rounding(dimension: int) -> float:
    """Bound the difference of two float32 products of vectors of length 1 from exact ones.

    Each errs by at most d * 2**-24 (Higham, Accuracy and Stability of Numerical Algorithms,
    section 3.1), whatever the order of summation.
    """
    return 4 * dimension * 2.0**-24


def normalized(vectors: Any) -> Vectors:
    """Return vectors as float32 of length 1.

    Raises:
        ValueError: One is zero or not finite; the message names its row.
    """
    array = np.asarray(vectors, np.float32)
    if array.ndim != 2:
        raise ValueError(f"the model's vectors must have the shape (n, d), not {array.shape}")
    lengths = np.linalg.norm(array.astype(np.float64), axis=1)
    bad = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if len(bad):
        what = "zero" if lengths[bad[0]] == 0 else "not finite"
        raise ValueError(f"the vector of row {bad[0]} is {what} and has no direction to compare")
    result: Vectors = (array / lengths[:, None]).astype(np.float32)
    return result


def model_name(embedding_model: Any) -> str:
    """Name an embedding model, so that an index can say which one made it."""
    name = getattr(embedding_model, "name", None)
    return name if isinstance(name, str) else type(embedding_model).__name__


def _predicate(where: Where) -> Callable[[Mapping[str, Any]], bool]:
    if callable(where):
        return where

    def matches(metadata: Mapping[str, Any]) -> bool:
        for key, wanted in where.items():
            if key not in metadata:
                return False
            if isinstance(wanted, (list, tuple, set, frozenset)):
                if metadata[key] not in wanted:
                    return False
            elif metadata[key] != wanted:
                return False
        return True

    return matches
