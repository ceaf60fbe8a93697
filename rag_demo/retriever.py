"""The interface of both retrievers: exact cosine search over texts.

A retriever is a `torch_utils.Resource`. Its methods call `ensure_open` before they use what it
holds, and `_release` runs exactly once and gives that up.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document
from rag_demo.encoding.embedder import BasicEmbedder, Embedder, as_embedder, check_embedding_model
from rag_demo.encoding.model_identity import refuse_other_model
from rag_demo.errors import short_repr
from rag_demo.searching.arguments import (
    check_documents,
    check_ids,
    check_queries,
    texts_to_embed,
)
from rag_demo.searching.contents import Contents, VectorRows
from rag_demo.searching.results import SearchResult, Stats
from rag_demo.searching.search import Search
from rag_demo.store.filters import Where
from rag_demo.store.index_format import GONE, Manifest
from rag_demo.store.reader import SavedIndex
from rag_demo.store.writer import IndexWriter, open_or_replace
from rag_demo.vectors import normalized
from torch_utils import Resource
from torch_utils.resource import closes_on_error

if TYPE_CHECKING:
    from rag_demo.reranker import Reranker

__all__ = ["BasicEmbedder", "Embedder", "Retriever", "SearchResult", "Stats", "Where"]

_ROWS_AT_ONCE = 1 << 13
_RERANKED = 5  # times as many results are reranked as are wanted


class _Saved(NamedTuple):
    """The folder of the last save or load, and the contents at that moment.

    It does not refer to the contents themselves: that would keep their vectors in memory.
    """

    folder: Path
    manifest: Manifest
    origin: object
    alive: npt.NDArray[np.bool_]
    rows: int

    @classmethod
    def of(cls, folder: Path, manifest: Manifest, contents: Contents) -> _Saved:
        alive, rows = contents.alive.rows, len(contents.owners)
        return cls(folder.resolve(), manifest, contents.origin, alive, rows)


class Retriever(Resource):
    """Exact cosine search over texts. A subclass stores and releases the vectors.

    Results are ordered by score, and equal scores by id. Filters are applied inside the search, so
    a search for five results returns five if five documents match. A retriever is closed at exit
    at the latest. Threads may share it: changes take turns, and searches wait neither for each
    other nor for `save`. Do not fork while another thread uses a retriever.

    A change that fails or is interrupted has no effect, because all state is in `_contents`, which
    is assigned last.

    Args:
        embedding_model: An `EmbeddingModel` or another `BasicEmbedder`. The retriever does not
            own it and does not close it.
        vectors: An empty store of vectors.
    """

    @closes_on_error
    def __init__(self, embedding_model: BasicEmbedder, vectors: VectorRows) -> None:
        check_embedding_model(embedding_model)
        self._changing = threading.RLock()
        self._searching: list[int] = []  # thread ids, one for each running search
        self._has_searched = threading.Condition()
        self.embedding_model = embedding_model
        self._contents = Contents(vectors)
        self._saved: _Saved | None = None

    def __len__(self) -> int:
        return self._contents.count

    def add(
        self,
        texts: Sequence[str],
        metadata: Sequence[Mapping[str, Any]] | None = None,
        ids: Sequence[str] | None = None,
        *,
        passages: bool = True,
        on_progress: Callable[[int], object] | None = None,
    ) -> list[str]:
        """Add documents. A document replaces an older one with the same id.

        Args:
            texts: The documents.
            metadata: A mapping of JSON values for each document. They are copied; filters
                compare them, and results contain them.
            ids: A different id for each document; by default "0", "1", ...
            passages: Embed texts of more than 1,000 characters by passage too, because a model
                reads only the beginning of a text. A document scores as the best of its passages
                and the whole text. The "title" in the metadata is put before each passage.
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
        checked, plain, names = check_documents(texts, metadata, ids)
        if not checked:
            return []
        documents = list(map(Document, names or [""] * len(checked), checked, plain))
        to_embed, owners, spans = texts_to_embed(documents, passages=passages)
        progress = None
        if on_progress is not None:
            progress = _of_documents(on_progress, len(documents), len(to_embed))
        embedder = as_embedder(self.embedding_model)
        embedded = embedder.embed_documents(to_embed, on_progress=progress)
        vectors = normalized(embedded, len(to_embed))
        with self._changing:
            self.ensure_open()
            contents = self._contents
            if names is None:
                names, contents = contents.choose_names(len(documents))
                documents = list(map(Document, names, checked, plain))
            self._contents = contents.with_documents(documents, owners, spans, vectors)
            return names

    def delete(self, ids: Sequence[str]) -> int:
        """Remove documents. Unknown ids are ignored.

        Args:
            ids: The ids of the documents.

        Returns:
            How many documents were removed.
        """
        names = check_ids(ids)
        with self._changing:
            self.ensure_open()
            left = self._contents.without_documents(names)
            removed = len(self) - left.count
            self._contents = left
            return removed

    def stats(self) -> Stats:
        """Return the number of documents, and the type and size of their vectors."""
        self.ensure_open()
        contents = self._contents
        return Stats(contents.count, contents.vectors.dimension, *contents.vectors.storage())

    def search(
        self,
        query: str,
        top_k: int = 5,
        min_score: float | None = None,
        where: Where | None = None,
        *,
        mode: str = "dense",
        rerank: Reranker | None = None,
    ) -> list[SearchResult]:
        """Find the documents nearest to a query.

        Args:
            query: The query.
            top_k: How many results at most.
            min_score: The lowest score of a result.
            where: Search only documents whose metadata match: ``{"lang": "en"}``,
                ``{"year": {"$gte": 2000}}``, or a function; see `Where`.
            mode: "dense" compares vectors, and scores are cosines. "bm25" searches the full
                text. "hybrid" fuses the first 100 results of both (or ``top_k``, if that is
                more) by their ranks.
            rerank: Scores and orders five times ``top_k`` results. ``min_score`` still applies
                to the scores of the search.

        Returns:
            The results, the best first.

        Raises:
            ValueError: ``top_k`` is not positive, the mode is unknown, or the model's vectors
                have another dimension than the documents' vectors.
            ResourceClosedError: This retriever or its embedding model is closed.
        """
        found = self.search_batch([query], top_k, min_score, where, mode=mode, rerank=rerank)
        return found[0]

    def search_batch(
        self,
        queries: Sequence[str],
        top_k: int = 5,
        min_score: float | None = None,
        where: Where | None = None,
        *,
        mode: str = "dense",
        vectors: Any = None,
        rerank: Reranker | None = None,
    ) -> list[list[SearchResult]]:
        """Find the documents nearest to each of several queries; see `search`.

        Args:
            queries: The queries.
            top_k: See `search`.
            min_score: See `search`.
            where: See `search`.
            mode: See `search`.
            vectors: The vectors of the queries, shape (b, d), to save the embedding.
            rerank: See `search`.

        Returns:
            The results of each query.
        """
        self.ensure_open()
        queries = check_queries(queries, top_k, min_score, mode)
        if rerank is not None and (isinstance(rerank, type) or not hasattr(rerank, "rerank")):
            raise TypeError(f"rerank must be a Reranker, got {short_repr(rerank)}")
        if vectors is not None and np.shape(vectors)[:-1] != (len(queries),):
            raise ValueError(
                f"vectors must have the shape ({len(queries)}, d), one for each query, "
                f"got {np.shape(vectors)}"
            )
        if not len(self) or not queries:
            return [[] for _ in queries]
        if mode == "bm25":
            vectors = None
        elif vectors is None:
            vectors = as_embedder(self.embedding_model).embed_queries(queries)
        if vectors is not None:
            vectors = normalized(vectors, len(queries))
        wanted = int(top_k) * (1 if rerank is None else _RERANKED)
        with self._search() as contents:
            found = Search(queries, vectors, wanted, min_score, where, mode).run(contents)
        if rerank is None:
            return found
        return [
            rerank.rerank(query, results, int(top_k))
            for query, results in zip(queries, found, strict=True)
        ]

    async def asearch(self, query: str, top_k: int = 5, **options: Any) -> list[SearchResult]:
        """Run `search` in a thread, without blocking the event loop."""
        return await asyncio.to_thread(self.search, query, top_k, **options)

    @contextlib.contextmanager
    def _search(self) -> Iterator[Contents]:
        """Yield the contents. `close` waits until the block ends."""
        thread = threading.get_ident()
        try:
            self._searching.append(thread)  # Before the check: `close` waits for these.
            self.ensure_open()
            yield self._contents
        finally:
            with self._has_searched, contextlib.suppress(ValueError):  # An interrupt came before.
                self._searching.remove(thread)
                self._has_searched.notify_all()

    def save(self, path: str | Path) -> None:
        """Save the index into a folder in one transaction. It is durable when this returns.

        An existing index in the folder is replaced. If it is the index that was loaded or saved
        last, only the changes are written.

        Args:
            path: The folder. It is created if it is missing.

        Raises:
            IndexFileError: The folder holds something else, another process is writing into it,
                or it cannot be written. The old content stays.
        """
        folder = Path(path)
        identity = as_embedder(self.embedding_model).identity
        with self._changing, open_or_replace(folder) as writer:
            self.ensure_open()
            contents, before = self._contents, self._saved
            if (
                before is not None
                and (before.folder, before.manifest) == (folder.resolve(), writer.manifest)
                and before.origin is contents.origin
                and 4 * writer.gone_rows <= len(writer.owners)
            ):
                gone = before.alive & ~contents.alive.rows[: len(before.alive)]
                writer.remove(np.flatnonzero(gone).tolist())
                row, number = before.rows, len(before.alive)
            else:
                before, row, number = None, 0, 0
                writer.clear(identity)
                if not contents.vectors.stays_in_file and not contents.live_rows.all():
                    self._contents = contents = contents.compact_copy()
            self._append(writer, contents, row, number)
            writer.describe(source=None, finished=True)
            writer.commit()
            assert writer.manifest is not None
            is_same = writer.manifest.rows == len(contents.owners)
            self._saved = _Saved.of(folder, writer.manifest, contents) if is_same else None
            if before is not None and contents.saved is not None:
                with self._has_searched:
                    if not self._searching:  # A search may still read the older state.
                        contents.saved.advance(writer.manifest)

    @staticmethod
    def _append(writer: IndexWriter, contents: Contents, row: int, number: int) -> None:
        """Write the rows from ``row`` on, and the documents from ``number`` on."""
        rows = np.arange(row, len(contents.owners))
        owners = contents.owners.rows[row:]
        owners = np.where((owners != GONE) & contents.alive.rows[owners], owners, GONE)
        if row == 0:
            rows, owners = rows[owners != GONE], owners[owners != GONE]
        pieces = (
            contents.vectors.take(rows[start : start + _ROWS_AT_ONCE])
            for start in range(0, len(rows), _ROWS_AT_ONCE)
        )
        writer.append(contents.numbered(number), owners, contents.passages.rows[rows], pieces,
                      contents.next_number)  # fmt: skip

    def load(self, path: str | Path) -> int:
        """Replace the contents by a saved index.

        The index stays in its files, which are checked when they are read. Changes by other
        processes do not affect it.

        Args:
            path: The folder of the index.

        Returns:
            How many documents it holds.

        Raises:
            IndexFileError: The index is missing or damaged; the old contents stay. In a large
                index, a search may be the first to find the damage.
            ModelMismatchError: The index was made with another embedding model.
        """
        self.ensure_open()
        folder = Path(path)
        identity = as_embedder(self.embedding_model).identity
        saved = SavedIndex(folder)
        refuse_other_model(folder, saved.manifest.model, identity)
        with self._changing:
            self.ensure_open()
            contents = Contents.with_saved_rows(self._contents.vectors.empty_copy(), saved)
            self._saved = _Saved.of(folder, saved.manifest, contents)
            self._contents = contents
            return len(self)

    def _release(self) -> None:
        if hasattr(self, "_contents"):  # `__init__` may have raised.
            self._take_out()

    def _take_out(self) -> VectorRows:
        """Wait for other threads, and close documents, full text and files.

        Returns:
            The vectors, which the subclass releases in place.
        """
        with self._changing, self._has_searched:
            self._has_searched.wait_for(lambda: set(self._searching) <= {threading.get_ident()})
            contents, self._saved = self._contents, None
            self._contents = contents.close()
            return contents.vectors


def _of_documents(
    on_progress: Callable[[int], object], documents: int, texts: int
) -> Callable[[int], None]:
    """Turn progress in embedded texts into progress in documents."""
    done = reported = 0

    def progress(count: int) -> None:
        nonlocal done, reported
        done += count
        on_progress(documents * done // texts - reported)
        reported = documents * done // texts

    return progress
