"""LocalStore: documents in SQLite, vectors in memory or in a file, words in tantivy; its search."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from rag_demo.encoding.model_identity import ModelIdentity, refuse_other_model
from rag_demo.errors import IndexChangedError, RagDemoError
from rag_demo.reading.document import Document
from rag_demo.search_request import Order, SearchRequest, SearchResult, Stats, by_mode
from rag_demo.stores.documents import GONE, Contents, DocumentTable
from rag_demo.stores.filters import Where
from rag_demo.stores.index_folder import Manifest, SavedIndex, open_writer, temporary_documents
from rag_demo.stores.store import EmbeddedBatch
from rag_demo.stores.words import TextIndex, best_span, check_language
from rag_demo.vectors import Mask, Pairs, Rows, Scores, Vectors, check_dimension, exact_scores
from torch_utils import ResourceClosedError, clear_exception_frames


class VectorRows(Protocol):
    """Rows of vectors of length 1: a snapshot that never changes.

    Snapshots share memory where they can, so extend the newest one only.
    """

    @property
    def dimension(self) -> int:
        """Length of the vectors; 0 without vectors."""

    def __len__(self) -> int:
        """How many rows there are."""

    def extended(self, vectors: Vectors) -> VectorRows:
        """Return a snapshot with more vectors at the end: shape (n, d)."""

    def with_saved_rows(self, saved: SavedIndex) -> VectorRows:
        """Return a snapshot with the vectors of a saved index; this one is empty."""

    def take(self, rows: Rows) -> Vectors:
        """Return a copy of the vectors of rows: shape (n, d), float32."""

    def candidates(self, queries: Vectors, top_k: int, allowed: Mask | None, order: Order) -> Pairs:
        """Find the ``top_k`` best rows of each query, and those that may tie with them.

        Args:
            queries: Shape (b, d), each of length 1.
            top_k: How many, at most as many as are allowed.
            allowed: Which rows to search: shape (rows,); None for all.
            order: Orders rows of equal score. Of those, only the first ones are needed.
        """

    @property
    def stays_in_file(self) -> bool:
        """Whether the vectors stay in a file because they exceed the memory budget."""

    def storage(self) -> tuple[str, str, int]:
        """Return the device, the dtype that is searched, and the bytes of the vectors."""


@dataclass(frozen=True, kw_only=True)
class Snapshot(Contents):
    """Contents with their vectors and words. Snapshots never change.

    Attributes:
        vectors: One row for each whole document and for each of its passages.
        words: The full-text index. It learns of new documents when it is searched, or from the
            next change after a search.
        saved: The saved index with the first documents, or None.
    """

    vectors: VectorRows
    words: TextIndex
    saved: SavedIndex | None = None

    def upserted(self, batch: EmbeddedBatch) -> Snapshot:
        """Add documents with their vectors."""
        if not len(batch.vectors):
            return self.with_batch(batch)
        if self.vectors.dimension:
            check_dimension(batch.vectors, self.vectors.dimension)
        return replace(self.with_batch(batch), vectors=self.vectors.extended(batch.vectors))

    def order_of(self, numbers: Any) -> Rows:
        """Return numbers that order documents by id."""
        numbers = np.asarray(numbers, np.int64)
        if "_order" in vars(self) or 8 * len(numbers) >= self.count:
            return np.asarray(self._order[numbers], np.int64)
        ids = self.documents.ids(numbers)
        place_of = {name: place for place, name in enumerate(sorted(set(ids)))}
        return np.asarray([place_of[name] for name in ids], np.int64)

    @cached_property
    def _order(self) -> Rows:
        """The place of each document in the order of ids."""
        alive = np.flatnonzero(self.alive)
        ids = self.documents.ids(alive)
        places = np.empty(self.next_number, np.int64)
        places[alive[sorted(range(len(ids)), key=ids.__getitem__)]] = np.arange(len(ids))
        return places


_CLOSED = "this store is closed"

Known = tuple[str, DocumentTable, Rows]
"""A state that was loaded or saved: its commit; its documents, of which the table is the same as
long as their numbers are; and its owners."""


class LocalStore:
    """A `Store` of this process, which can be saved into a folder and loaded from it.

    What was not saved lies in SQLite in a temporary folder. Threads may share a store: changes take
    turns, and searches wait neither for each other nor for a change. A change that fails or is
    interrupted has no effect, because all state is in ``_snapshot``, which is assigned last.

    Args:
        vectors: An empty store of vectors.
        language: The language of stems in the full text; see `rag_demo.stores.words.stems_of`. A
            loaded index has its own.
    """

    def __init__(self, vectors: VectorRows, language: str = "english") -> None:
        check_language(language)
        self._changing = threading.RLock()
        self._searching: list[int] = []  # thread ids, one for each running search
        self._has_searched = threading.Condition()
        self._is_closed = False
        self._uses_words = False
        self._no_vectors = vectors
        self._snapshot = self._empty(language)
        self._saved: dict[Path, list[Known]] = {}

    @property
    def identity(self) -> ModelIdentity | None:
        """See `Store`."""
        return self._snapshot.identity

    @property
    def count(self) -> int:
        """See `Store`."""
        return self._snapshot.count

    def stats(self) -> Stats:
        """See `Store`."""
        snapshot = self._snapshot
        return Stats(snapshot.count, snapshot.vectors.dimension, *snapshot.vectors.storage())

    def upsert(self, batch: EmbeddedBatch, *, choose_ids: bool = False) -> list[str]:
        """See `Store`."""
        with self._change() as snapshot:
            if choose_ids:
                batch = batch.with_unused_ids(snapshot.find, snapshot.next_number)
            new = self._tidied(snapshot.upserted(batch))
            if self._uses_words:  # Otherwise the next search would wait for the new texts.
                self._uses_words = False
                with contextlib.suppress(RagDemoError):  # That search raises it.
                    new.words.catch_up(new.documents, new.alive)
            self._snapshot = new
            return [document.id for document in batch.documents]

    def delete(self, ids: Sequence[str]) -> int:
        """See `Store`."""
        with self._change() as snapshot:
            left = snapshot.without(ids)
            self._snapshot = self._tidied(left)
            return snapshot.count - left.count

    def _empty(self, language: str) -> Snapshot:
        words = TextIndex(language)
        return Snapshot(documents=temporary_documents(), vectors=self._no_vectors, words=words)

    def _tidied(self, snapshot: Snapshot) -> Snapshot:
        """Copy the documents that exist, with new numbers, if most of the rows are of others."""
        is_wasteful = snapshot.wastes_space and not snapshot.vectors.stays_in_file
        if snapshot.count and not is_wasteful:
            return snapshot
        new = self._empty(snapshot.words.language)
        for batch in snapshot.batches(snapshot.vectors.take):
            new = new.upserted(batch)
        return new

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """See `Store`."""
        with self._search() as snapshot:
            return snapshot.get(ids)

    def ids(self) -> Iterator[str]:
        """See `Store`."""
        with self._search() as snapshot:
            return iter(snapshot.documents.ids(np.flatnonzero(snapshot.alive)))

    def matching(
        self, where: Where | None, after: str | None = None, limit: int | None = None
    ) -> list[str]:
        """See `Store`."""
        with self._search() as snapshot:
            return snapshot.matching(where, after, limit)

    def keys(self) -> list[str]:
        """Return the keys of metadata, and the one of the id, in order."""
        with self._search() as snapshot:
            return snapshot.documents.keys()

    def files_in(self, prefix: str) -> list[str]:
        """Return the files whose names begin with a prefix that ends with a separator."""
        with self._search() as snapshot:
            return snapshot.documents.files_in(prefix)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the index that was loaded last."""
        return cast(SavedIndex, self._snapshot.saved).manifest

    def search(self, request: SearchRequest) -> list[list[SearchResult]]:
        """See `Store`."""
        with self._search() as snapshot:
            self._uses_words |= request.mode != "dense"
            try:
                return search(snapshot, request)
            except BaseException as error:  # A kept exception must not keep views of vectors.
                clear_exception_frames(error)
                raise

    def batches(self) -> Iterator[EmbeddedBatch]:
        """Yield all documents with their vectors, as they are at the first batch."""
        with self._search() as snapshot:
            batches = snapshot.batches(snapshot.vectors.take)
        while True:
            with self._search():  # `close` does not wait for a caller that stops in between.
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def _change(self) -> Iterator[Snapshot]:
        with self._changing:
            if self._is_closed:
                raise ResourceClosedError(_CLOSED)
            yield self._snapshot

    @contextlib.contextmanager
    def _search(self) -> Iterator[Snapshot]:
        """Yield the snapshot. `close` waits until the block ends."""
        thread = threading.get_ident()
        try:
            self._searching.append(thread)  # Before the check: `close` waits for these.
            if self._is_closed:
                raise ResourceClosedError(_CLOSED)
            yield self._snapshot
        finally:
            with self._has_searched, contextlib.suppress(ValueError):  # An interrupt came before.
                self._searching.remove(thread)
                self._has_searched.notify_all()

    def save(self, folder: Path, identity: ModelIdentity, *, overwrite: bool = False) -> str:
        """See `rag_demo.retriever.LocalRetriever.save`. Returns the name of the saved state."""
        place = folder.resolve()
        with self._change() as snapshot, open_writer(folder, start_over=overwrite) as writer:
            committed, states = writer.manifest, self._saved.get(place, [])
            known = [one for one in states if one[0] == committed.commit]
            if committed.model is not None and not known and not overwrite:
                if states or committed.source is not None or not committed.model.is_same(identity):
                    what = "has changed since it was" if states else "was not"
                    raise IndexChangedError(
                        f"the index in '{place}' {what} loaded or saved here; load it and repeat "
                        "the changes, or replace it with overwrite=True"
                    )
                _ = writer.contents  # A damaged index is not replaced.
            before = np.empty(0, np.int64)
            if known and known[0][1] is snapshot.documents and not overwrite:
                before = known[0][2]
                if np.array_equal(before, snapshot.owners):
                    return committed.commit  # Nothing has changed, so other writers keep theirs.
            else:
                writer.clear(identity)
                writer.use_language(snapshot.words.language)
            first = int(before.max(initial=GONE)) + 1  # Earlier documents are in the folder.
            writer.documents.insert(snapshot.documents.stream(snapshot.alive, first))
            writer.write(snapshot, before, snapshot.vectors.take)
            commit, source, saved = secrets.token_hex(8), None, snapshot.saved
            if saved is not None and snapshot.owners is saved.contents.owners:
                source = saved.manifest.source  # This is a copy.
            # After an interrupt it is unknown which of the two states the folder has.
            self._saved[place] = [*known, (commit, snapshot.documents, snapshot.owners)]
            finished = saved is None or saved.manifest.finished  # Else it lacks documents still.
            writer.commit(commit, source=source, finished=finished, words=snapshot.words)
        return commit

    def compact(self, folder: Path, identity: ModelIdentity) -> None:
        """See `rag_demo.retriever.LocalRetriever.compact`."""
        with self._change():  # No other thread adds something in between.
            self.save(folder, identity)
            with open_writer(folder) as writer:
                writer.compact()
            self.load(folder, identity)

    def load(
        self, folder: Path, identity: ModelIdentity | None = None, *, check: bool = False
    ) -> int:
        """See `rag_demo.retriever.LocalRetriever.load`. Without an identity, accept any model."""
        with contextlib.ExitStack() as stack:
            saved = SavedIndex(folder)
            stack.callback(saved.close)
            refuse_other_model(saved.manifest.model, identity, f" in '{folder}'")
            if check:
                saved.check_vectors()
            vectors = self._no_vectors.with_saved_rows(saved)
            known = {each.name: getattr(saved.contents, each.name) for each in fields(Contents)}
            loaded = Snapshot(**known, vectors=vectors, words=saved.words, saved=saved)
            with self._change():
                stack.pop_all()  # Before it is used: an interrupt must not close its files.
                self._snapshot = loaded
                # Last: what is not loaded is not known, so `save` does not replace it.
                state = (saved.manifest.commit, loaded.documents, loaded.owners)
                self._saved[folder.resolve()] = [state]
            return loaded.count

    def close(self) -> VectorRows:
        """Wait for other threads, and close documents, full text and files.

        Returns:
            The vectors, which the retriever releases in place.
        """
        with self._changing, self._has_searched:
            self._is_closed = True  # First: a later search would not be waited for.
            self._has_searched.wait_for(lambda: set(self._searching) <= {threading.get_ident()})
            snapshot = self._snapshot
            snapshot.words.close()
            snapshot.documents.close()
            if snapshot.saved is not None:
                snapshot.saved.close()
            self._saved = {}
            self._snapshot = self._empty(snapshot.words.language)
            return snapshot.vectors


class Hit(NamedTuple):
    """A document that a search has found.

    Attributes:
        id: Its number.
        score: Its score.
        row: The row of that score.
        scores: See `rag_demo.search_request.SearchResult`.
    """

    id: int
    score: float
    row: int
    scores: Mapping[str, float] = MappingProxyType({})


Hits = list[list[tuple[int, float, int]]]
"""The hits of each query; only the fusion of two rankings needs names, which take time."""


def search(snapshot: Snapshot, request: SearchRequest) -> list[list[SearchResult]]:
    """Return the answers to each query."""
    queries, vectors = request.texts, request.vectors
    allowed = snapshot.documents.matching(request.where, snapshot.alive)
    count = int(np.count_nonzero(allowed))
    if not count:
        return [[] for _ in queries]

    def best(part: str, depth: int) -> Any:
        if part == "bm25" or vectors is None:
            found = _by_words(snapshot, queries, allowed, depth)
        else:
            mask = None if count == len(allowed) else allowed
            found = _by_vectors(snapshot, vectors, mask, min(depth, count))
        is_fused = request.mode == "hybrid"
        return [list(itertools.starmap(Hit, each)) for each in found] if is_fused else found

    nearest = partial(_nearest, snapshot, cast(Vectors, vectors))  # A hybrid search has some.
    found = by_mode(request, best, nearest, snapshot.order_of)
    return _results(snapshot, queries, request.mode, found)


def _by_vectors(snapshot: Snapshot, queries: Vectors, allowed: Mask | None, wanted: int) -> Hits:
    """Find the ``wanted`` best documents for each query by their vectors."""
    vectors, owners = snapshot.vectors, snapshot.owners
    # GONE is the last place.
    mask: Mask | None = None if allowed is None else np.append(allowed, False)[owners]
    check_dimension(queries, vectors.dimension)
    available = len(vectors) if mask is None else int(np.count_nonzero(mask))
    depth = wanted

    def order_of(rows: Rows) -> Rows:
        return snapshot.order_of(owners[rows])

    while True:  # Until the rows belong to as many documents as are wanted.
        query, rows, scores = vectors.candidates(queries, depth, mask, order_of)
        best = _best(query, rows, scores, depth, order_of)
        query, rows, scores = query[best], rows[best], scores[best]
        pairs = query * snapshot.next_number + owners[rows]
        once = np.sort(np.unique(pairs, return_index=True)[1])  # each document with its best row
        query, rows, scores = query[once], rows[once], scores[once]
        counts = np.bincount(query, minlength=len(queries))
        if depth == available or counts.min() >= wanted:
            columns = (owners[rows].tolist(), scores.tolist(), rows.tolist())
            hits = zip(*columns, strict=True)
            return [list(itertools.islice(hits, n))[:wanted] for n in counts.tolist()]
        depth = min(4 * depth, available)


def _by_words(snapshot: Snapshot, queries: Sequence[str], allowed: Mask, top_k: int) -> Hits:
    """Find the best documents for each query by full text."""
    snapshot.words.catch_up(snapshot.documents, snapshot.alive)
    found = []
    for query in queries:
        numbers, scores = snapshot.words.search(query, allowed, top_k)
        best = _best(np.zeros_like(numbers), numbers, scores, top_k, snapshot.order_of)
        pairs = zip(numbers[best].tolist(), scores[best].tolist(), strict=True)
        found.append([(number, score, -1) for number, score in pairs])
    return found


def _nearest(snapshot: Snapshot, queries: Vectors, pairs: list[tuple[int, int]]) -> list[Hit]:
    """Return for each pair of a query and a document the document's best row."""
    query, numbers = np.asarray(pairs, np.int64).T
    rows = np.flatnonzero(np.isin(snapshot.owners, numbers))
    rows = rows[np.argsort(snapshot.owners[rows], kind="stable")]
    owners = snapshot.owners[rows]
    first, stop = np.searchsorted(owners, numbers), np.searchsorted(owners, numbers, "right")
    pair = np.repeat(np.arange(len(pairs)), stop - first)
    rows = rows[np.concatenate(list(map(np.arange, first, stop)))]
    scores = exact_scores(snapshot.vectors.take, queries, query[pair], rows)
    order = np.lexsort((rows, -scores, pair))
    best = order[np.searchsorted(pair, np.arange(len(pairs)))]
    return list(map(Hit, numbers.tolist(), scores[best].tolist(), rows[best].tolist()))


def _best(query: Rows, items: Rows, scores: Scores, count: int, order_of: Order) -> Rows:
    """Return the places of the best items, query by query. Equal scores are ordered by id."""
    order = np.lexsort((-scores, query))
    query, scores = query[order], scores[order]
    first, end = np.searchsorted(query, query), np.searchsorted(query, query, "right")
    kept = scores >= scores[np.minimum(first + count, end) - 1]
    query, scores, order = query[kept], scores[kept], order[kept]
    is_tie = (np.diff(scores) == 0) & (np.diff(query) == 0)
    if is_tie.any():
        tied, place = np.append(is_tie, False) | np.append(False, is_tie), np.zeros_like(order)
        place[tied] = order_of(items[order[tied]])
        order = order[np.lexsort((items[order], place, -scores, query))]
    best: Rows = order[np.arange(len(order)) - np.searchsorted(query, query) < count]
    return best


def _results(
    snapshot: Snapshot, queries: Sequence[str], mode: str, found: Any
) -> list[list[SearchResult]]:
    hits = [hit for each in found for hit in each]
    if not hits:
        return [[] for _ in queries]
    numbers, scores, rows, *of_parts = zip(*hits, strict=True)
    names, texts, metadata, _ = snapshot.documents.columns(numbers)
    parts: Iterable[Any] = of_parts[0] if of_parts else ({mode: score} for score in scores)
    starts, stops = snapshot.spans[np.asarray(rows)].T.tolist()
    passages = [(a, b) if b else None for a, b in zip(starts, stops, strict=True)]
    if mode == "bm25":
        owners = snapshot.owners
        cut = np.flatnonzero(np.isin(owners, numbers) & (snapshot.spans[:, 1] > 0))
        asked = [query for query, each in zip(queries, found, strict=True) for _ in each]
        for n, number in enumerate(numbers):
            known = snapshot.spans[cut[owners[cut] == number]].tolist()
            passages[n] = best_span(asked[n], texts[n], known, snapshot.words.language)
    places = [place for each in found for place in range(1, len(each) + 1)]
    fields = zip(places, scores, names, texts, metadata, passages, parts, strict=True)
    results = map(partial(tuple.__new__, SearchResult), fields)  # Faster than calls.
    return [list(itertools.islice(results, len(each))) for each in found]
