"""The Retriever interface: texts in, the nearest of them out, by exact cosine similarity."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Record, Records
from rag_demo.documents.rows import DocumentProgress, Parts, split
from rag_demo.index import SavedIndex, read_index, write_index
from rag_demo.searching.filters import Where, predicate
from rag_demo.searching.ranking import Found, Pairs, best_of_each, rank
from rag_demo.searching.results import Embedder, SearchResult, Stats
from rag_demo.searching.words import FUSED_FROM, MODES, LexicalIndex, fuse
from rag_demo.storage.mapped_file import MappedFile
from rag_demo.vectors import Rows, Vectors, normalized
from torch_utils import Resource

__all__ = ["Embedder", "Retriever", "SearchResult", "Stats", "Where"]


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
        self._parts = Parts(0)
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
        passages: bool = False,
        on_progress: Callable[[int], object] | None = None,
    ) -> list[str]:
        """Add documents; one whose id is there already replaces the old one.

        Args:
            texts: The documents.
            metadata: A mapping for each, to filter by and to get back; JSON values.
            ids: A name for each; by default "0", "1", ...
            passages: Embed texts over 1,000 characters by passage too, which their answers then
                name: a document scores as the best of its passages and the whole, of which a
                model reads the beginning only. Metadata's "title" is put before passages.
            on_progress: Called now and then with the count of documents embedded since the last
                call; only for models whose ``embed_documents`` takes it.

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
        given = metadata or [{}] * len(texts)
        documents = zip(texts, given, strict=True)
        inputs, parts = split(documents) if passages else (texts, Parts(len(texts)))
        options = {}
        if on_progress is not None:
            options["on_progress"] = DocumentProgress(len(texts), len(inputs), on_progress)
        vectors = normalized(self.embedding_model.embed_documents(list(inputs), **options))
        if len(vectors) != len(inputs):
            raise ValueError(f"the model made {len(vectors)} vectors of {len(inputs)} texts")
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
            self._parts = Parts.join([self._parts, parts])
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
                self._keep(self._parts.rows(kept))
                self._parts = self._parts.keep(kept)
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
            if allowed is not None and not allowed.any():
                return [[] for _ in queries]
            if vectors is not None and mode == "dense":
                ranked = self._search_vectors(vectors, top_k, allowed)
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
        near: list[list[Found]] = [[] for _ in queries]
        if vectors is not None:
            near = self._search_vectors(vectors, depth, allowed)
        answers = []
        for query, by_vector in zip(queries, near, strict=True):
            rows, scores = self._lexical.search(query, depth, allowed)
            ranked: list[tuple[int, float]] = list(zip(rows.tolist(), scores.tolist(), strict=True))
            spans = {document: span for document, _, span in by_vector}
            if vectors is not None:
                ranked = fuse([list(spans), rows.tolist()], top_k)
            best = [(document, score, spans.get(document)) for document, score in ranked[:top_k]]
            answers.append(self._answers(best, min_score))
        return answers

    def _search_vectors(
        self, queries: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> list[list[Found]]:
        """Find the best documents for each query: shape (b, d) to b lists."""
        wanted = min(top_k, len(self) if allowed is None else int(allowed.sum()))
        rows = None if allowed is None else self._parts.spread(allowed)
        available = len(self._parts) if rows is None else int(rows.sum())
        depth = wanted
        while True:  # Until so many rows are of as many documents as are wanted.
            pairs = self._candidates(queries, depth, rows)
            ranked = rank(self._vectors, queries, pairs, depth, self._name_of)
            best = [best_of_each(hits, self._parts)[:wanted] for hits in ranked]
            if depth == available or all(len(found) == wanted for found in best):
                return best
            depth = min(4 * depth, available)

    def _answers(self, best: Sequence[Found], min_score: float | None) -> list[SearchResult]:
        """Make answers of documents, the best first."""
        return [
            SearchResult(rank, score, *self._records[document], span)
            for rank, (document, score, span) in enumerate(best, start=1)
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
            write_index(Path(path), name, self._vectors(), self._records, self._parts)

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
            self._records, self._parts = saved.records, saved.parts
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

    def _name_of(self, row: int) -> str:
        return self._records[int(self._parts.owners(np.asarray(row)))].id

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
