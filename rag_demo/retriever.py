"""The Retriever interface: texts in, the nearest of them out, by exact cosine similarity.

As a resource: a subclass opens (see `rag_demo.pytorch_gpu_retriever`), everything here asks
`ensure_open` before it uses what is held, and `_release`, at the end, gives it up exactly once.
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
from rag_demo.encoding.embedder import BasicEmbedder, Embedder, check_embedding_model, completed
from rag_demo.encoding.model_identity import refuse_other_model
from rag_demo.errors import shown
from rag_demo.searching.arguments import (
    check_documents,
    check_ids,
    check_questions,
    texts_to_embed,
)
from rag_demo.searching.contents import Contents, VectorRows
from rag_demo.searching.results import SearchResult, Stats
from rag_demo.searching.search import Search
from rag_demo.store.facts import GONE, IndexFacts
from rag_demo.store.filters import Where
from rag_demo.store.reader import SavedIndex
from rag_demo.store.writer import IndexWriter, open_or_replace
from rag_demo.vectors import normalized
from torch_utils import Resource
from torch_utils.resource import closes_on_error

if TYPE_CHECKING:
    from rag_demo.reranker import Reranker

__all__ = ["BasicEmbedder", "Embedder", "Retriever", "SearchResult", "Stats", "Where"]

_ROWS_AT_ONCE = 1 << 13
_RERANKED = 5  # times as many answers are reranked as are wanted


class _Saved(NamedTuple):
    """What is known of the folder that holds the contents, as they were at one moment.

    Not the contents themselves, whose vectors would stay in memory.
    """

    folder: Path
    facts: IndexFacts
    origin: object
    alive: npt.NDArray[np.bool_]
    rows: int

    @classmethod
    def of(cls, folder: Path, facts: IndexFacts, contents: Contents) -> _Saved:
        alive, rows = contents.alive.rows, len(contents.owners)
        return cls(folder.resolve(), facts, contents.origin, alive, rows)


class Retriever(Resource):
    """Exact cosine search over texts; a subclass says where the vectors are, and gives them back.

    Results are ordered by score, equal scores by id. Filters are applied inside the search:
    asking for five gives five wherever five match. Closed at exit at the latest. Threads may share
    it: changes take turns, and searches wait neither for each other nor for `save`.

    A change that fails, or is interrupted at whichever moment, has changed nothing: all state is
    in `_contents`, which is assigned last. A process must not fork while another of its threads
    uses a retriever.

    Args:
        embedding_model: An `EmbeddingModel`, or anything else that is a `BasicEmbedder`. It is
            not owned, and not closed with this.
        vectors: Where vectors are kept, without any yet.
    """

    @closes_on_error
    def __init__(self, embedding_model: BasicEmbedder, vectors: VectorRows) -> None:
        check_embedding_model(embedding_model)
        self._changing = threading.RLock()
        self._searching: list[int] = []  # the threads, each as often as it searches
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
            TypeError: A text or an id is not a str, or metadata are not JSON.
            ValueError: Lengths differ, an id stands twice, or a vector of the model is zero, not
                finite, or of another dimension than those that are here.
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
        embedder = completed(self.embedding_model)
        embedded = embedder.embed_documents(to_embed, on_progress=progress)
        vectors = normalized(embedded, len(to_embed))
        with self._changing:
            self.ensure_open()
            contents = self._contents
            if names is None:
                names, contents = contents.choose_names(len(documents))
                documents = list(map(Document, names, checked, plain))
            self._contents = contents.added(documents, owners, spans, vectors)
            return names

    def delete(self, ids: Sequence[str]) -> int:
        """Remove documents; ids that are not there are passed over.

        Returns:
            How many were removed.
        """
        names = check_ids(ids)
        with self._changing:
            self.ensure_open()
            left = self._contents.without(names)
            removed = len(self) - left.count
            self._contents = left
            return removed

    def stats(self) -> Stats:
        """Say how many documents there are, and what their vectors are and take."""
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
        """Find the documents nearest to a question.

        Args:
            query: The question.
            top_k: How many at most.
            min_score: Leave out what scores lower.
            where: Search only among documents whose metadata match: ``{"lang": "en"}``,
                ``{"year": {"$gte": 2000}}``, or a function; see `Where`.
            mode: "dense" compares vectors, and scores are cosines; "bm25" compares words;
                "hybrid" fuses the first hundred, or ``top_k`` if that is more, of both by their
                ranks, which scores say.
            rerank: Orders five times ``top_k`` answers anew, whose scores are then its own;
                ``min_score`` still applies to the scores of the search.

        Raises:
            ValueError: ``top_k`` is not positive, there is no such mode, or the model's vectors
                have another dimension than those that are here.
            ResourceClosedError: This retriever, or its embedding model, is closed.
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
        """Find the documents nearest to each of several questions; see `search`.

        Args:
            queries: The questions.
            top_k: See `search`.
            min_score: See `search`.
            where: See `search`.
            mode: See `search`.
            vectors: The questions' vectors, if they are known: shape (b, d).
            rerank: See `search`.
        """
        self.ensure_open()
        queries = check_questions(queries, top_k, min_score, mode)
        if rerank is not None and (isinstance(rerank, type) or not hasattr(rerank, "rerank")):
            raise TypeError(f"rerank must be a Reranker, not {shown(rerank)}")
        if vectors is not None and np.shape(vectors)[:-1] != (len(queries),):
            raise ValueError(
                f"vectors must have the shape ({len(queries)}, d), one for each query, "
                f"not {np.shape(vectors)}"
            )
        if not len(self) or not queries:
            return [[] for _ in queries]
        if mode == "bm25":
            vectors = None
        elif vectors is None:
            vectors = completed(self.embedding_model).embed_queries(queries)
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
        """Do what `search` does in a thread, while the event loop goes on."""
        return await asyncio.to_thread(self.search, query, top_k, **options)

    @contextlib.contextmanager
    def _search(self) -> Iterator[Contents]:
        """Yield the contents; closing waits until the block ends."""
        thread = threading.get_ident()
        try:
            self._searching.append(thread)  # First: closing looks at these once it has begun.
            self.ensure_open()
            yield self._contents
        finally:
            with self._has_searched, contextlib.suppress(ValueError):  # Interrupted before.
                self._searching.remove(thread)
                self._has_searched.notify_all()

    def save(self, path: str | Path) -> None:
        """Save the index into a folder, as one transaction that is durable when this returns.

        An index that the folder holds is replaced, whatever it is of. Into the folder that was
        loaded, or saved into last, only changes are written.

        Raises:
            IndexFileError: The folder holds something else, is being written by another process,
                or cannot be written. What was there stays.
        """
        folder = Path(path)
        identity = completed(self.embedding_model).identity
        with self._changing, open_or_replace(folder) as writer:
            self.ensure_open()
            contents, before = self._contents, self._saved
            if (
                before is not None
                and (before.folder, before.facts) == (folder.resolve(), writer.facts)
                and before.origin is contents.origin
                and 4 * writer.gone_rows <= len(writer.owners)
            ):
                gone = before.alive & ~contents.alive.rows[: len(before.alive)]
                writer.remove(np.flatnonzero(gone).tolist())
            else:
                before = None
                writer.clear(identity)
                if not contents.vectors.stays_in_file and not contents.live_rows.all():
                    self._contents = contents = contents.compacted()
            row, number = (
                (0, 0) if before is None
                else (before.rows, len(before.alive))
            )  # fmt: skip
            self._append(writer, contents, row, number)
            writer.describe(source=None, finished=True)
            writer.commit()
            assert writer.facts is not None
            is_same = writer.facts.rows == len(contents.owners)
            self._saved = _Saved.of(folder, writer.facts, contents) if is_same else None
            if before is not None and contents.saved is not None:
                with self._has_searched:
                    if not self._searching:  # What a search may still read is left as it is.
                        contents.saved.see(writer.facts)

    @staticmethod
    def _append(writer: IndexWriter, contents: Contents, row: int, number: int) -> None:
        """Write the rows from one on, and the documents from a number on."""
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
        """Open a saved index in place of what is here.

        It stays in its files, which are checked before they are used, and is not disturbed by
        what other processes do to them.

        Returns:
            How many documents it holds.

        Raises:
            IndexFileError: It is missing or damaged; what was here stays. Damage in a large
                index may be found by a search only.
            ModelMismatchError: It was made with another embedding model.
        """
        self.ensure_open()
        folder = Path(path)
        identity = completed(self.embedding_model).identity
        saved = SavedIndex(folder)
        refuse_other_model(folder, saved.facts.model, identity)
        with self._changing:
            self.ensure_open()
            contents = Contents.opened(self._contents.vectors.emptied(), saved)
            self._saved = _Saved.of(folder, saved.facts, contents)
            self._contents = contents
            return len(self)

    def _release(self) -> None:
        if hasattr(self, "_contents"):  # Else `__init__` has refused its arguments.
            self._take_out()

    def _take_out(self) -> VectorRows:
        """Wait for what other threads do, and give up documents, words and files.

        Returns:
            The vectors, for a subclass to give back in place.
        """
        with self._changing, self._has_searched:
            self._has_searched.wait_for(lambda: set(self._searching) <= {threading.get_ident()})
            contents, self._saved = self._contents, None
            self._contents = contents.released()
            return contents.vectors


def _of_documents(
    on_progress: Callable[[int], object], documents: int, texts: int
) -> Callable[[int], None]:
    """Tell of documents while texts are embedded for them, of which there are more."""
    done = told = 0

    def progress(count: int) -> None:
        nonlocal done, told
        done += count
        on_progress(documents * done // texts - told)
        told = documents * done // texts

    return progress
