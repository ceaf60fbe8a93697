"""The Retriever interface: texts in, the nearest of them out, by exact cosine similarity.

As a resource: a subclass opens (see `rag_demo.pytorch_gpu_retriever`), everything here asks
`ensure_open` before it uses what is held, and `_release`, at the end, gives it up exactly once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rag_demo.documents.rows import DocumentProgress
from rag_demo.encoding.embedder import BasicEmbedder, Embedder, check_embedding_model, completed
from rag_demo.index import read_index, write_index
from rag_demo.searching.asked import Asked
from rag_demo.searching.collection import Collection
from rag_demo.searching.filters import Where
from rag_demo.searching.given import Given, check_names, check_questions
from rag_demo.searching.results import SearchResult, Stats
from rag_demo.searching.vector_store import VectorStore
from rag_demo.vectors import normalized
from torch_utils import Resource

__all__ = ["BasicEmbedder", "Embedder", "Retriever", "SearchResult", "Stats", "Where"]


class Retriever(Resource):
    """Exact cosine search over texts; a subclass says where the vectors are, and gives them back.

    Results are ordered by score, equal scores by id. Filters are applied inside the search:
    asking for five gives five wherever five match. Closed at exit at the latest. Threads: one
    operation at a time; the embedding model, which it does not own, works outside the lock.

    A change that fails, or is interrupted at whichever moment, has changed nothing: all that is
    held hangs on one attribute, which is set when everything else is ready.

    Args:
        embedding_model: An `EmbeddingModel`, or anything else that is a `BasicEmbedder`. It is
            not owned, and not closed with this.
        vectors: Where vectors are kept, without any yet.
    """

    def __init__(self, embedding_model: BasicEmbedder, vectors: VectorStore) -> None:
        check_embedding_model(embedding_model)
        self._lock = threading.RLock()
        self.embedding_model = embedding_model
        self._held = Collection(vectors)

    def __len__(self) -> int:
        return len(self._held)

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
            metadata: A mapping for each, to filter by and to get back; JSON values, copied.
            ids: A name for each; by default "0", "1", ...
            passages: Embed texts over 1,000 characters by passage too, which their answers then
                name: a document scores as the best of its passages and the whole, of which a
                model reads the beginning only. Metadata's "title" is put before passages.
            on_progress: Called now and then with the count of documents embedded since the last
                call; once, at the end, where the model does not tell.

        Returns:
            The ids.

        Raises:
            TypeError: A text or an id is no text, or metadata are not JSON.
            ValueError: Lengths differ, an id stands twice, or a vector of the model is zero, not
                finite, or of another dimension than those that are here.
            ResourceClosedError: This retriever is closed.
        """
        self.ensure_open()
        given = Given.checked(texts, metadata, ids)
        if not given.texts:
            return []
        to_embed, rows = given.to_embed(passages)
        progress = None
        if on_progress is not None:
            progress = DocumentProgress(len(given.texts), len(to_embed), on_progress)
        embedder = completed(self.embedding_model)
        embedded = embedder.embed_documents(to_embed, on_progress=progress)
        vectors = normalized(embedded, len(to_embed))
        with self._lock:
            self.ensure_open()
            names, held = given.names(self._held)
            self._held = held.added(given.documents(names), rows, vectors)
            return names

    def delete(self, ids: Sequence[str]) -> int:
        """Remove documents; ids that are not there are passed over.

        Returns:
            How many were removed.
        """
        names = check_names(ids)
        with self._lock:
            self.ensure_open()
            left = self._held.without(names)
            removed = len(self._held) - len(left)
            self._held = left
            return removed

    def stats(self) -> Stats:
        """Say how many documents there are, and what their vectors are and take."""
        with self._lock:
            self.ensure_open()
            vectors = self._held.vectors
            return Stats(len(self), vectors.dimension, *vectors.storage())

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
            where: Search only among documents whose metadata match: ``{"lang": "en"}``,
                ``{"year": {"$gte": 2000}}``, or a function; see `Where`.
            mode: "dense" compares vectors, and scores are cosines; "bm25" compares words;
                "hybrid" fuses the first hundred of both by their ranks, which scores say.

        Raises:
            ValueError: ``top_k`` is not positive, there is no such mode, or the model's vectors
                have another dimension than those that are here.
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
        queries = check_questions(queries, top_k, min_score, mode)
        if not len(self) or not queries:
            return [[] for _ in queries]
        vectors = None
        if mode != "bm25":
            embedder = completed(self.embedding_model)
            vectors = normalized(embedder.embed_queries(queries), len(queries))
        with self._lock:
            self.ensure_open()
            asked = Asked(queries, vectors, int(top_k), min_score, where, mode)
            return asked.answers(self._held)

    def save(self, path: str | Path) -> None:
        """Save the index into a folder, replacing one that is there only when all is written.

        Raises:
            IndexFileError: The folder holds something else, or cannot be written.
        """
        with self._lock:
            self.ensure_open()
            self._held = held = self._held.merged()
            write_index(
                Path(path),
                completed(self.embedding_model).identity,
                held.vectors.vectors(),
                held.documents,
                held.rows,
                derived=held.derived(),
            )

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
            empty = self._held.vectors.emptied()
            self._held = Collection.opened(empty, saved)
            return len(self)

    def _release(self) -> None:
        """Give up everything: documents, words, files, vectors; not the embedding model.

        A subclass that overrides this, to give back in place what others may still refer to,
        calls it too.
        """
        with self._lock:  # A search that is under way in another thread ends first.
            self._held = self._held.emptied()
