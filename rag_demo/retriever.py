"""The Retriever interface: texts in, the nearest of them out, by exact cosine similarity."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document, Documents
from rag_demo.documents.rows import DocumentProgress, DocumentRows, texts_to_embed
from rag_demo.encoding.embedder import BasicEmbedder, Embedder, check_embedding_model, completed
from rag_demo.index import SavedIndex, read_index, write_index
from rag_demo.searching.filters import Where, predicate
from rag_demo.searching.modes import MODES
from rag_demo.searching.ranking import FUSED_FROM, Found, Pairs, best_of_each, fuse, rank
from rag_demo.searching.results import SearchResult, Stats
from rag_demo.searching.words import WordIndex
from rag_demo.storage.mapped_file import MappedFile
from rag_demo.vectors import Rows, Vectors, normalized
from torch_utils import Resource

__all__ = ["BasicEmbedder", "Embedder", "Retriever", "SearchResult", "Stats", "Where"]


class Retriever(Resource, ABC):
    """Exact cosine search over texts; a subclass keeps the vectors.

    Results are ordered by score, equal scores by id. Filters are applied inside the search:
    asking for five gives five wherever five match. Closed at exit at the latest. Threads: one
    operation at a time; the embedding model, which it does not own, works outside the lock.

    Args:
        embedding_model: An `EmbeddingModel`, or anything else that is a `BasicEmbedder`. It is
            not owned, and not closed with this.
    """

    def __init__(self, embedding_model: BasicEmbedder) -> None:
        check_embedding_model(embedding_model)
        self._lock = threading.RLock()
        self.embedding_model = embedding_model
        self._next_id = 0
        self._hold_nothing()

    def _hold_nothing(self) -> None:
        """Be empty, but for the vectors: the one place that knows all that is held."""
        self._documents = Documents()
        self._rows = DocumentRows(0)
        self._unchecked: SavedIndex | None = None
        self._word_index: WordIndex | None = None  # made by the first search that needs it
        self._file: MappedFile | None = None  # where the vectors are, if all are of an index

    def __len__(self) -> int:
        return len(self._documents)

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
                call; once, at the end, where the model does not tell.

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
        to_embed, rows = list(texts), DocumentRows(len(texts))
        if passages:
            to_embed, rows = texts_to_embed(zip(texts, given, strict=True))
        progress = None
        if on_progress is not None:
            progress = DocumentProgress(len(texts), len(to_embed), on_progress)
        embedder = completed(self.embedding_model)
        vectors = normalized(embedder.embed_documents(to_embed, on_progress=progress))
        if len(vectors) != len(to_embed):
            raise ValueError(f"the model made {len(vectors)} vectors of {len(to_embed)} texts")
        with self._lock:
            self.ensure_open()
            if len(self) and vectors.shape[1] != self._dimension():
                raise ValueError(
                    f"the model's vectors have {vectors.shape[1]} dimensions, "
                    f"those already here {self._dimension()}"
                )
            names = [str(name) for name in ids] if ids is not None else self._new_ids(len(texts))
            self.delete([name for name in names if self._documents.number_of(name) is not None])
            self._file = self._word_index = None
            self._append(vectors)
            self._rows = DocumentRows.join([self._rows, rows])
            entries = zip(names, texts, given, strict=True)
            self._documents.extend(
                [Document(name, text, dict(entry)) for name, text, entry in entries]
            )
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
            numbers = (self._documents.number_of(str(name)) for name in ids)
            gone = sorted({number for number in numbers if number is not None})
            if gone:
                self._check_loaded()
                self._file = self._word_index = None
                kept = np.delete(np.arange(len(self), dtype=np.int64), gone)
                self._keep(self._rows.rows_of(kept))
                self._rows = self._rows.keep(kept)
                self._documents.keep(kept)
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
        embedder = completed(self.embedding_model)
        vectors = None if mode == "bm25" else normalized(embedder.embed_queries(queries))
        with self._lock:
            self.ensure_open()
            self._check_loaded()
            allowed = None if where is None else self._matching(where)
            if allowed is not None and not allowed.any():
                return [[] for _ in queries]
            if vectors is None:
                best = self._by_words(queries, top_k, allowed)
            elif mode == "dense":
                best = self._by_vectors(vectors, top_k, allowed)
            else:
                best = self._by_both(queries, vectors, top_k, allowed)
            return [self._answers(found, min_score) for found in best]

    def _by_words(
        self, queries: Sequence[str], top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> list[list[Found]]:
        """Find the best documents for each query by their words."""
        if self._word_index is None:
            self._word_index = WordIndex(document.text for document in self._documents)
        best: list[list[Found]] = []
        for query in queries:
            numbers, scores = self._word_index.search(query, top_k, allowed)
            pairs = zip(numbers.tolist(), scores.tolist(), strict=True)
            best.append([(number, score, None) for number, score in pairs])
        return best

    def _by_both(
        self,
        queries: Sequence[str],
        vectors: Vectors,
        top_k: int,
        allowed: npt.NDArray[np.bool_] | None,
    ) -> list[list[Found]]:
        """Find the best documents for each query by vectors and by words, and fuse their ranks."""
        depth = max(top_k, FUSED_FROM)
        fused = []
        for by_vectors, by_words in zip(
            self._by_vectors(vectors, depth, allowed),
            self._by_words(queries, depth, allowed),
            strict=True,
        ):
            spans = {number: span for number, _, span in by_vectors}
            rankings = [[number for number, *_ in found] for found in (by_vectors, by_words)]
            best = fuse(rankings, top_k)
            fused.append([(number, score, spans.get(number)) for number, score in best])
        return fused

    def _by_vectors(
        self, queries: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> list[list[Found]]:
        """Find the best documents for each query: shape (b, d) to b lists."""
        wanted = min(top_k, len(self) if allowed is None else int(allowed.sum()))
        rows = None if allowed is None else self._rows.spread(allowed)
        available = len(self._rows) if rows is None else int(rows.sum())
        depth = wanted
        while True:  # Until so many rows are of as many documents as are wanted.
            pairs = self._candidates(queries, depth, rows)
            ranked = rank(self._vectors, queries, pairs, depth, self._name_of)
            best = [best_of_each(hits, self._rows)[:wanted] for hits in ranked]
            if depth == available or all(len(found) == wanted for found in best):
                return best
            depth = min(4 * depth, available)

    def _answers(self, best: Sequence[Found], min_score: float | None) -> list[SearchResult]:
        """Make answers of documents, the best first."""
        return [
            SearchResult(rank, score, *self._documents[document], span)
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
            model = completed(self.embedding_model).identity
            write_index(Path(path), model, self._vectors(), self._documents, self._rows)

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
        saved = read_index(Path(path), expected_model=completed(self.embedding_model).identity)
        with self._lock:
            self.ensure_open()
            self._clear()
            self._hold_nothing()
            self._documents, self._rows, self._file = saved.documents, saved.rows, saved.file
            if len(saved.documents):
                self._append(saved.vectors)
            self._unchecked = saved
            return len(self)

    def _release(self) -> None:
        """Give up everything: documents, words, files, vectors; not the embedding model.

        A subclass that overrides this, to give back in place what others may still refer to,
        calls it too.
        """
        with self._lock:  # A search that is under way in another thread ends first.
            self._clear()
            self._hold_nothing()

    def _check_loaded(self) -> None:
        """Check the vectors of an opened index, once, before they are first used."""
        if self._file is not None:
            self._file.check_length()  # Reading what was cut off would end the process.
        if self._unchecked is not None:
            self._unchecked.check_vectors()
            self._unchecked = None

    def _new_ids(self, count: int) -> list[str]:
        names: list[str] = []
        while len(names) < count:
            if self._documents.number_of(str(self._next_id)) is None:
                names.append(str(self._next_id))
            self._next_id += 1
        return names

    def _matching(self, where: Where) -> npt.NDArray[np.bool_]:
        matches = predicate(where)
        return np.fromiter(
            (matches(document.metadata) for document in self._documents), bool, len(self)
        )

    def _name_of(self, row: int) -> str:
        return self._documents[int(self._rows.owners(np.asarray(row)))].id

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
