"""The interface of all retrievers: exact cosine search over texts.

A retriever is a `torch_utils.Resource`. It checks arguments, embeds, and reranks; a
`rag_demo.stores.store.Store` keeps and searches the documents. `LocalRetriever` can save them into
a folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rag_demo.encoding import embedder
from rag_demo.encoding.embedder import BasicEmbedder
from rag_demo.errors import InvalidValueError, check_positive, checked_texts, short_repr
from rag_demo.neighbors import with_neighbors
from rag_demo.reading.document import Document
from rag_demo.search_request import (
    RERANKED,
    SearchRequest,
    SearchResult,
    Stats,
    check_documents,
    check_search,
)
from rag_demo.stores.filters import Where, parse_filter
from rag_demo.stores.ingest import embed
from rag_demo.stores.local import LocalStore
from rag_demo.stores.store import EmbeddedBatch, Store
from rag_demo.vectors import normalized
from torch_utils import Resource, closes_on_error

if TYPE_CHECKING:
    from rag_demo.reranker import Reranker

__all__ = ["BasicEmbedder", "LocalRetriever", "Retriever", "SearchResult", "embed"]

_MOST = 2**40  # more results than an index has documents; numpy and SQL count in 64 bits


class Retriever(Resource):
    """Exact cosine search over texts. A subclass chooses the store and releases it.

    Results are ordered by score, and equal scores by id. Filters are applied inside the search, so
    a search for five results returns five if five documents match. A retriever is closed at exit
    at the latest. Threads may share it: changes take turns, and searches wait neither for each
    other nor for a change. Do not fork while another thread uses a retriever.

    A change that fails or is interrupted has no effect.

    Args:
        embedding_model: An `EmbeddingModel` or another `BasicEmbedder`. The retriever does not
            own it and does not close it.
        store: An empty store, which the retriever owns.
    """

    @closes_on_error
    def __init__(self, embedding_model: BasicEmbedder, store: Store) -> None:
        self.store = store
        embedder.check_embedding_model(embedding_model)
        self.embedding_model = embedding_model

    def __len__(self) -> int:
        return self.store.count

    def add(
        self,
        texts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]] | None = None,
        ids: Sequence[str] | None = None,
        *,
        vectors: Any = None,
        passages: bool = True,
        chunk_size: int | None = None,
        chunk_overlap: int = 0,
        on_progress: Callable[[int], object] | None = None,
    ) -> list[str]:
        """Add documents. A document replaces an older one with the same id.

        Args:
            texts: The documents.
            metadata: A mapping of JSON values for each document. They are copied; filters
                compare them, and results contain them.
            ids: A different id for each document; by default "0", "1", ...
            vectors: A vector for each text, shape (n, d), to save the embedding. Then texts have
                no passages.
            passages: Embed texts of more than 900 characters, and those that the model cannot
                read to their end, by passage too. A document scores as the best of its passages
                and the whole text. The "title" in the metadata is put before each of them.
            chunk_size: Characters of a passage, at most; passages with too many tokens for the
                model are cut further. By default 800. If it is given, all longer texts are
                embedded by passage.
            chunk_overlap: Characters that a passage shares with the one before, at most.
            on_progress: Called with the number of documents embedded since the last call. If the
                model reports no progress, it is called once, at the end.

        Returns:
            The ids.

        Raises:
            TypeError: A text or an id is not str, or metadata are not JSON.
            ValueError: Lengths differ, an id is repeated, or a vector of the model is zero, not
                finite, or of another dimension than the present ones.
            ResourceClosedError: This retriever is closed.
        """
        self.ensure_open()
        documents = check_documents(texts, metadata, ids)
        if not documents:
            return []
        if vectors is not None:
            places, spans = np.arange(len(documents)), np.zeros((len(documents), 2), np.int32)
            identity = embedder.known_identity(self.embedding_model)
            checked = normalized(vectors, len(documents))
            batch = EmbeddedBatch(documents, places, spans, checked, identity)
        else:
            batch = embed(
                documents,
                self.embedding_model,
                passages=passages,
                chunk_size=chunk_size,
                chunk_overlap=chunk_overlap,
                on_progress=on_progress,
            )
        return self.store.upsert(batch, choose_ids=ids is None)

    def update_metadata(self, ids: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> int:
        """Replace the metadata of documents. Unknown ids are ignored.

        Nothing is embedded again. For vectors, and in PostgreSQL for words, a new "title" counts
        only after the document is added again.

        Args:
            ids: The ids of the documents, all different.
            metadata: The new metadata of each document.

        Returns:
            How many documents were changed.

        Raises:
            ValueError: Another thread has replaced the text of one of them meanwhile.
        """
        names = checked_texts(ids, "ids")
        described = check_documents([""] * len(names), metadata, names)
        changed = [
            before._replace(metadata=after.metadata)
            for before, after in zip(self.store.get(names), described, strict=True)
            if before is not None
        ]
        if changed:
            self.store.upsert(EmbeddedBatch.without_vectors(changed))
        return len(changed)

    def delete(self, ids: Sequence[str] = (), *, where: Where | None = None) -> int:
        """Remove documents. Unknown ids are ignored.

        Args:
            ids: The ids of the documents.
            where: Also remove the documents that match this filter; see `Where`.

        Returns:
            How many documents were removed.

        Raises:
            ValueError: The filter is ``{}``, which all documents match.
        """
        names = checked_texts(ids, "ids")
        if where == {}:
            everything = '{"$id": {"$exists": True}}'
            raise ValueError(f"where={{}} matches all documents; to delete them pass {everything}")
        if where is not None:
            names += self.store.matching(where)
        return self.store.delete(names)

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """Return a document for each id; None for an unknown one.

        Args:
            ids: The ids of the documents.
        """
        return self.store.get(checked_texts(ids, "ids"))

    def documents(
        self, where: Where | None = None, *, after: str | None = None, limit: int | None = None
    ) -> list[Document]:
        """Return documents ordered by id: a page of them, or all.

        Args:
            where: Only documents that match this filter; see `Where`.
            after: Only ids after this one: the last id of the page before.
            limit: How many at most.
        """
        check_positive("limit", limit)
        found = self.store.get(self.store.matching(where, after, limit))
        return [each for each in found if each is not None]

    def count(self, where: Where | None = None) -> int:
        """Return how many documents match a filter; without one, how many there are."""
        self.ensure_open()
        return self.store.count if where is None else len(self.store.matching(where))

    def ids(self) -> Iterator[str]:
        """Yield the ids of all documents, in the order in which they were added."""
        return self.store.ids()

    def stats(self) -> Stats:
        """Return the number of documents, and the type and size of their vectors."""
        self.ensure_open()
        return self.store.stats()

    def search(
        self,
        query: str | None,
        top_k: int = 5,
        min_score: float | None = None,
        where: Where | None = None,
        mode: str = "hybrid",
        *,
        vector: Any = None,
        weights: tuple[float, float] = (1.0, 1.0),
        rerank: Reranker | None = None,
        neighbors: int = 0,
    ) -> list[SearchResult]:
        """Find the documents that answer a query best.

        Args:
            query: The query; None to search only by ``vector``.
            top_k: How many results at most.
            min_score: The lowest score of a result.
            where: Search only documents whose metadata match: ``{"lang": "en"}``,
                ``{"year": {"$gte": 2000}}``, or a function; see `Where`.
            mode: "dense" compares vectors, and scores are cosines. "bm25" searches the full
                text. "hybrid" fuses the first 100 results of both (or ``top_k``, if that is
                more) by their ranks.
            vector: The vector of the query, shape (d,), to save the embedding.
            weights: How much the ranks by vectors and by full text count in the mode "hybrid".
            rerank: Scores and orders five times ``top_k`` results. ``min_score`` still applies
                to the scores of the search.
            neighbors: How many passages before and after a result its text includes, if it is a
                passage of a file. They match ``where`` too.

        Returns:
            The results, the best first.

        Raises:
            ValueError: ``top_k`` is not positive, the mode is unknown, no score can reach
                ``min_score``, or the vectors have another dimension than the documents' vectors.
            ResourceClosedError: This retriever or its embedding model is closed.
        """
        if query is None:
            if vector is None or mode == "bm25":
                raise TypeError("search needs a query, or a vector and another mode than 'bm25'")
            query, mode = "", "dense"
        vectors = None if vector is None else np.asarray(vector)[None]
        found = self.search_batch(
            [query],
            top_k,
            min_score,
            where,
            mode,
            vectors=vectors,
            weights=weights,
            rerank=rerank,
            neighbors=neighbors,
        )
        return found[0]

    def search_batch(
        self,
        queries: Sequence[str],
        top_k: int = 5,
        min_score: float | None = None,
        where: Where | None = None,
        mode: str = "hybrid",
        *,
        vectors: Any = None,
        weights: tuple[float, float] = (1.0, 1.0),
        rerank: Reranker | None = None,
        neighbors: int = 0,
    ) -> list[list[SearchResult]]:
        """Find the documents that answer each of several queries best; see `search`.

        Args:
            queries: The queries.
            top_k: See `search`.
            min_score: See `search`.
            where: See `search`.
            mode: See `search`.
            vectors: The vectors of the queries, shape (b, d), to save the embedding.
            weights: See `search`.
            rerank: See `search`.
            neighbors: See `search`.

        Returns:
            The results of each query.
        """
        self.ensure_open()
        queries, weights = check_search(queries, top_k, min_score, mode, weights)
        if type(neighbors) is not int or neighbors < 0:
            raise InvalidValueError(
                f"neighbors must be 0 or a positive whole number, got {short_repr(neighbors)}"
            )
        if rerank is not None and (isinstance(rerank, type) or not hasattr(rerank, "rerank")):
            raise TypeError(f"rerank must be a Reranker, got {short_repr(rerank)}")
        if vectors is not None:
            vectors = normalized(vectors, len(queries))
        if where is not None and not callable(where):
            where = parse_filter(where)  # A mistake is an error in an empty retriever too.
        if not self.store.count or not queries:
            return [[] for _ in queries]
        if mode == "bm25":
            vectors = None
        elif vectors is None:
            vectors = embedder.embed_queries(self.embedding_model, queries)
        wanted = min(int(top_k) * (1 if rerank is None else RERANKED), _MOST)
        found = self.store.search(SearchRequest(queries, vectors, where, wanted, mode, weights))
        if min_score is not None:
            found = [[each for each in one if each.score >= min_score] for one in found]
        if rerank is not None:
            pairs = zip(queries, found, strict=True)
            found = [rerank.rerank(query, results, int(top_k)) for query, results in pairs]
        if neighbors:
            found = [with_neighbors(self.store, each, neighbors, where) for each in found]
        return found

    async def asearch(self, query: str, top_k: int = 5, **options: Any) -> list[SearchResult]:
        """Run `search` in a thread, without blocking the event loop."""
        return await asyncio.to_thread(self.search, query, top_k, **options)

    def _release(self) -> None:
        if hasattr(self, "store"):  # `__init__` may have raised.
            self.store.close()


class LocalRetriever(Retriever):
    """A `Retriever` over a `LocalStore`, which can be saved and loaded."""

    store: LocalStore

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Save the index into a folder in one transaction. It is durable when this returns.

        If the folder holds the index that was loaded or saved last, only the changes are written.
        Another index that a program made with the same model is replaced.

        Args:
            path: The folder. It is created if it is missing.
            overwrite: Whether to replace any index: one that is damaged, that has changed since
                this retriever loaded or saved it, or that a command or another model made.

        Raises:
            IndexChangedError: Another program has changed the index, or a command or another
                model made it. Load it and repeat the changes.
            IndexFileError: The folder holds something else, another process is writing into it,
                the index is damaged, or it cannot be written. The old content stays.
        """
        identity = embedder.identity_of(self.embedding_model)
        self.store.save(Path(path), identity, overwrite=overwrite)

    def compact(self, path: str | Path) -> None:
        """Save the index, and make its files again without anything of deleted documents.

        A cache of the embedding model and snapshots of the index may still have their vectors.

        Args:
            path: The folder, as for `save`.

        Raises:
            IndexFileError: See `save`.
        """
        identity = embedder.identity_of(self.embedding_model)
        self.store.compact(Path(path), identity)

    def load(self, path: str | Path, *, check: bool = False) -> int:
        """Replace the contents by a saved index.

        The index stays in its files. Changes by other processes do not affect it.

        Args:
            path: The folder of the index.
            check: Whether to compare all vectors with their checksums now, instead of at the first
                search.

        Returns:
            How many documents it holds.

        Raises:
            IndexFileError: The index is missing or damaged; the old contents stay. In a large
                index, a search may be the first to find the damage.
            ModelMismatchError: The index was made with another embedding model.
        """
        identity = embedder.identity_of(self.embedding_model)
        return self.store.load(Path(path), identity, check=check)
