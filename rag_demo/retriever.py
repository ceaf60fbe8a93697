"""The Retriever interface: texts in, the nearest of them out, by exact cosine similarity."""

from __future__ import annotations

import itertools
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.filters import Where, predicate
from rag_demo.index import SavedIndex, read_index, write_index
from rag_demo.index_files import MappedFile
from rag_demo.lexical import FUSED_FROM, MODES, LexicalIndex, fuse
from rag_demo.records import Record, Records
from rag_demo.results import Embedder, SearchResult, Stats
from rag_demo.vectors import Rows, Vectors, normalized
from torch_utils import Resource

__all__ = ["Embedder", "Retriever", "SearchResult", "Stats", "Where"]

Pairs = tuple[Rows, Rows]
Hit = tuple[int, float]  # a row and its score

_PAIRS = 512  # scored at once: 1.5 MB of vectors


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
        self._records = Records()
        self._unchecked: SavedIndex | None = None
        self._lexical: LexicalIndex | None = None  # made by the first search that needs it
        self._file: MappedFile | None = None  # where the vectors are, if all are of an index
        self._next_id = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._records)

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
            self.delete([name for name in names if self._records.row_of(name) is not None])
            self._file = self._lexical = None
            self._append(vectors)
            given = metadata or [{}] * len(texts)
            entries = zip(names, texts, given, strict=True)
            self._records.extend([Record(name, text, dict(entry)) for name, text, entry in entries])
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
            rows = (self._records.row_of(str(name)) for name in ids)
            gone = sorted({row for row in rows if row is not None})
            if gone:
                self._check_loaded()
                self._file = self._lexical = None
                kept = np.delete(np.arange(len(self), dtype=np.int64), gone)
                self._keep(kept)
                self._records.keep(kept)
            return len(gone)

    def stats(self) -> Stats:
        """Say how many documents there are, and what their vectors are and take."""
        with self._lock:
            self.ensure_open()
            device, dtype, nbytes = self._storage()
            return Stats(len(self), self._dimension() if len(self) else 0, device, dtype, nbytes)

    def search(
        self,
        query: str,
        top_k: int = 5,
        min_score: float | None = None,
        where: Where | None = None,
        *,
        mode: str = "dense",
    ) -> list[SearchResult]:
        """Find the documents nearest to a question.

        Args:
            query: The question.
            top_k: How many at most.
            min_score: Leave out what scores lower.
            where: Search only among documents whose metadata match.
            mode: "dense" compares vectors, and scores are cosines; "bm25" compares words;
                "hybrid" fuses the first hundred of both by their ranks, which scores say.

        Raises:
            ValueError: ``top_k`` is not positive, or there is no such mode.
            ResourceClosedError: This retriever, or its embedding model, is closed.
        """
        return self.search_batch([query], top_k, min_score, where, mode=mode)[0]

    def search_batch(
        self,
        queries: Sequence[str],
        top_k: int = 5,
        min_score: float | None = None,
        where: Where | None = None,
        *,
        mode: str = "dense",
    ) -> list[list[SearchResult]]:
        """Find the documents nearest to each of several questions; see `search`."""
        self.ensure_open()
        if isinstance(queries, str):
            raise TypeError("search_batch() takes a sequence of questions, not one; use search()")
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ValueError(f"top_k must be a positive whole number, not {top_k!r}")
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        if not len(self) or not queries:
            return [[] for _ in queries]
        vectors = None if mode == "bm25" else self._embed_queries(queries)
        with self._lock:
            self.ensure_open()
            self._check_loaded()
            allowed = None if where is None else self._matching(where)
            available = len(self) if allowed is None else int(allowed.sum())
            if not available:
                return [[] for _ in queries]
            if vectors is not None and mode == "dense":
                query, row = self._candidates(vectors, min(top_k, available), allowed)
                ranked = self._ranked(vectors, query, row, top_k)
                return [self._answers(hits, min_score) for hits in ranked]
            return self._search_words(queries, vectors, top_k, min_score, allowed)

    def _search_words(
        self,
        queries: Sequence[str],
        vectors: Vectors | None,
        top_k: int,
        min_score: float | None,
        allowed: npt.NDArray[np.bool_] | None,
    ) -> list[list[SearchResult]]:
        """Search by words, and by ``vectors`` too if there are any."""
        if self._lexical is None:
            self._lexical = LexicalIndex(record.text for record in self._records)
        depth = max(top_k, FUSED_FROM)
        by_vector: list[list[Hit]] = [[] for _ in queries]
        if vectors is not None:
            available = len(self) if allowed is None else int(allowed.sum())
            pairs = self._candidates(vectors, min(depth, available), allowed)
            by_vector = self._ranked(vectors, *pairs, depth)
        answers = []
        for query, near in zip(queries, by_vector, strict=True):
            rows, scores = self._lexical.search(query, depth, allowed)
            hits: list[Hit] = list(zip(rows.tolist(), scores.tolist(), strict=True))[:top_k]
            if vectors is not None:
                hits = fuse([[row for row, _ in near], rows.tolist()], top_k)
            answers.append(self._answers(hits, min_score))
        return answers

    def _answers(self, hits: Sequence[Hit], min_score: float | None) -> list[SearchResult]:
        """Make answers of rows and scores, the best first."""
        return [
            SearchResult(rank, score, *self._records[row])
            for rank, (row, score) in enumerate(hits, start=1)
            if min_score is None or score >= min_score
        ]

    def save(self, path: str | Path) -> None:
        """Save the index into a folder, replacing one that is there only when all is written.

        Raises:
            IndexFileError: The folder holds something else, or cannot be written.
        """
        with self._lock:
            self.ensure_open()
            self._check_loaded()
            name = model_name(self.embedding_model)
            write_index(Path(path), name, self._vectors(), self._records)

    def load(self, path: str | Path) -> int:
        """Open a saved index in place of what is here.

        It stays in its files, which are mapped into memory and checked before they are used.

        Returns:
            How many documents it holds.

        Raises:
            IndexFileError: It is missing or damaged; what was here stays. Damage in an index of
                more than 64 MB may be found by the first search only.
            ModelMismatchError: It was made with another embedding model.
        """
        self.ensure_open()
        saved = read_index(Path(path), expected_model=model_name(self.embedding_model))
        with self._lock:
            self.ensure_open()
            self._clear()
            self._records = saved.records
            self._lexical = None
            self._file = saved.file
            if len(saved.records):
                self._append(saved.vectors)
            self._unchecked = saved
            return len(self)

    def _check_loaded(self) -> None:
        """Check the vectors of an opened index, once, before they are first used."""
        if self._unchecked is not None:
            self._unchecked.check_vectors()
            self._unchecked = None

    def _new_ids(self, count: int) -> list[str]:
        names: list[str] = []
        while len(names) < count:
            if self._records.row_of(str(self._next_id)) is None:
                names.append(str(self._next_id))
            self._next_id += 1
        return names

    def _embed_queries(self, queries: Sequence[str]) -> Vectors:
        embed_queries = getattr(self.embedding_model, "embed_queries", None)
        if embed_queries is not None:
            return normalized(embed_queries(list(queries)))
        return normalized([self.embedding_model.embed_query(query) for query in queries])

    def _matching(self, where: Where) -> npt.NDArray[np.bool_]:
        matches = predicate(where)
        return np.fromiter((matches(r.metadata) for r in self._records), bool, len(self))

    def _ranked(self, queries: Vectors, query: Rows, row: Rows, top_k: int) -> list[list[Hit]]:
        """Score candidates again, each by itself and in float64, and order them.

        How a matrix product rounds depends on its shape and on the count of threads; this does
        not, so neither do scores, ties and the order of the answers.

        Args:
            queries: Shape (b, d).
            query: Which query each candidate is for, sorted: shape (p,).
            row: The candidates: shape (p,).
            top_k: How many at most.

        Returns:
            For each query the best rows with their scores, ties by id.
        """
        scores = np.empty(len(row))
        for start in range(0, len(row), _PAIRS):
            part = slice(start, start + _PAIRS)
            vectors = self._vectors(row[part]).astype(np.float64)
            scores[part] = (vectors * queries[query[part]]).sum(axis=1)
        order = np.lexsort((-scores, query))
        row, scores = row[order], scores[order]
        starts = np.searchsorted(query, np.arange(len(queries) + 1))
        ranked: list[list[Hit]] = []
        for start, stop in itertools.pairwise(starts.tolist()):
            its_scores = scores[start:stop].tolist()
            hits = list(zip(row[start:stop].tolist(), its_scores, strict=True))
            if any(map(operator.eq, its_scores[: top_k + 1], its_scores[1 : top_k + 1])):
                hits.sort(key=self._order)  # Equal scores: the smaller id comes first.
            ranked.append(hits[:top_k])
        return ranked

    def _order(self, hit: Hit) -> tuple[float, str]:
        row, score = hit
        return -score, self._records[row].id

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
    def _storage(self) -> tuple[str, str, int]:
        """Return the device, the dtype that is searched in, and the bytes of the vectors."""

    @abstractmethod
    def _candidates(
        self, queries: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> Pairs:
        """Find the ``top_k`` best of each query, and all that might tie with them.

        Args:
            queries: Shape (b, d), each of length 1.
            top_k: At most as many as there are.
            allowed: Shape (n,): look only at these; None for all.

        Returns:
            Pairs of a query's number and a row: two arrays of one length, sorted by the query.
        """


def model_name(embedding_model: Any) -> str:
    """Name an embedding model, so that an index can say which one made it."""
    name = getattr(embedding_model, "name", None)
    return name if isinstance(name, str) else type(embedding_model).__name__
