"""LocalStore: documents in SQLite, vectors in memory or in a file, words in tantivy; its search."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from rag_demo.encoding.model_identity import ModelIdentity, refuse_other_model
from rag_demo.errors import IndexChangedError, RagDemoError
from rag_demo.exact_search.scores import Pairs, Scores, exact_scores
from rag_demo.reading.document import Document
from rag_demo.searching.results import SearchResult, Stats
from rag_demo.stores.contents import Contents
from rag_demo.stores.filters import Where
from rag_demo.stores.index_folder import Manifest, SavedIndex, temporary_documents
from rag_demo.stores.index_writer import IndexWriter
from rag_demo.stores.ranking import FUSED_FROM, Order, fused_scores
from rag_demo.stores.store import EmbeddedBatch, unused_ids
from rag_demo.stores.words import TextIndex, best_span, check_language
from rag_demo.vectors import Mask, Rows, Vectors, check_dimension
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
        """Return a snapshot with the vectors of a saved index instead of these."""

    def empty_copy(self) -> VectorRows:
        """Return a snapshot without vectors."""

    def take(self, rows: Rows) -> Vectors:
        """Return a copy of the vectors of rows: shape (n, d), float32."""

    def candidates(
        self, queries: Vectors, top_k: int, allowed: Mask | None, order_of: Order
    ) -> Pairs:
        """Find the ``top_k`` best rows of each query, and those that may tie with them.

        Args:
            queries: Shape (b, d), each of length 1.
            top_k: How many, at most as many as are allowed.
            allowed: Which rows to search: shape (rows,); None for all.
            order_of: Orders rows of equal score. Of those, only the first ones are needed.
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
        words: The full-text index. It learns of new documents when it is searched.
        saved: The saved index with the first documents, or None.
        origin: The same object in all snapshots that share their numbers.
        order: The place of each document in the order of ids, once it is needed.
    """

    vectors: VectorRows
    words: TextIndex
    saved: SavedIndex | None = None
    origin: object = field(default_factory=object)
    order: list[Rows] = field(default_factory=list, init=False)

    @classmethod
    def empty(cls, vectors: VectorRows, language: str) -> Snapshot:
        """Return a snapshot without documents."""
        return cls(documents=temporary_documents(), vectors=vectors, words=TextIndex(language))

    def emptied(self) -> Snapshot:
        """Return a snapshot without documents, with the same settings."""
        return self.empty(self.vectors.empty_copy(), self.words.language)

    @classmethod
    def load(cls, vectors: VectorRows, saved: SavedIndex) -> Snapshot:
        """Return the snapshot of a saved index. Its files are read when they are needed."""
        return cls(
            **vars(saved.contents),
            vectors=vectors.with_saved_rows(saved),
            words=saved.words,
            saved=saved,
        )

    def upserted(self, batch: EmbeddedBatch) -> Snapshot:
        """Add documents with their vectors."""
        if not len(batch.vectors):
            return self.with_batch(batch)
        if self.vectors.dimension:
            check_dimension(batch.vectors, self.vectors.dimension)
        return replace(self.with_batch(batch), vectors=self.vectors.extended(batch.vectors))

    def tidied(self) -> Snapshot:
        """Copy the documents that exist, with new numbers, if most of the rows are of others."""
        if not self.count:
            return self.emptied()
        if self.vectors.stays_in_file or not self.wastes_space:
            return self
        new = self.emptied()
        for batch in self.batches(self.vectors.take):
            new = new.upserted(batch)
        return new

    def order_of(self, numbers: Rows) -> Rows:
        """Return numbers that order documents by id."""
        if not self.order and 8 * len(numbers) < self.count:
            ids = self.documents.ids(numbers)
            place_of = {name: place for place, name in enumerate(sorted(set(ids)))}
            return np.asarray([place_of[name] for name in ids], np.int64)
        if not self.order:
            alive = np.flatnonzero(self.alive)
            ids = self.documents.ids(alive)
            places = np.empty(self.next_number, np.int64)
            places[alive[sorted(range(len(ids)), key=ids.__getitem__)]] = np.arange(len(ids))
            self.order.append(places)  # Any search may store it.
        result: Rows = self.order[0][numbers]
        return result

    def close(self) -> None:
        """Close all files and databases. Nothing may be using these."""
        self.words.close()
        self.documents.close()
        if self.saved is not None:
            self.saved.close()


class Known(NamedTuple):
    """What a store remembers of a state that it has loaded or saved.

    Attributes:
        origin: That of the snapshot.
        owners: The owner of each row.
        next_number: The number of the next document.
    """

    origin: object
    owners: Rows = np.empty(0, np.int64)
    next_number: int = 0


_CLOSED = "this store is closed"
_WORDS_BEHIND = 1 << 10  # documents that are added to the full-text index by the next search


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
        self._snapshot = Snapshot.empty(vectors, language)
        # For each folder the commits that this store knows.
        self._saved: dict[Path, dict[str, Known]] = {}

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
                batch = batch.with_ids(
                    unused_ids(snapshot.find, snapshot.next_number, len(batch.documents))
                )
            self._snapshot = snapshot = snapshot.upserted(batch).tidied()
            if snapshot.next_number - snapshot.words.end >= _WORDS_BEHIND:
                # Else the first search by words would do it all.
                with contextlib.suppress(RagDemoError):  # A search tries again and raises it.
                    snapshot.words.catch_up(snapshot.documents, snapshot.alive)
            return [document.id for document in batch.documents]

    def delete(self, ids: Sequence[str]) -> int:
        """See `Store`."""
        with self._change() as snapshot:
            left = snapshot.without(ids)
            self._snapshot = left.tidied()
            return snapshot.count - left.count

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

    def kinds(self) -> dict[str, set[int]]:
        """Return the keys of metadata, each with the kinds of its values."""
        with self._search() as snapshot:
            return snapshot.documents.kinds()

    def files_in(self, prefix: str) -> list[str]:
        """Return the files whose names begin with a prefix that ends with a separator."""
        with self._search() as snapshot:
            return snapshot.documents.files_in(prefix)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the index that was loaded last."""
        assert self._snapshot.saved is not None
        return self._snapshot.saved.manifest

    def verify(self) -> None:
        """Check the index that was loaded: its database, its vectors and its full text.

        Raises:
            IndexFileError: Something is damaged.
        """
        with self._search() as snapshot:
            assert snapshot.saved is not None
            snapshot.saved.verify()

    def search(
        self,
        texts: Sequence[str],
        vectors: Vectors | None,
        where: Where | None,
        top_k: int,
        mode: str,
        weights: tuple[float, float] = (1.0, 1.0),
    ) -> list[list[SearchResult]]:
        """See `Store`."""
        with self._search() as snapshot:
            try:
                return search(snapshot, texts, vectors, where, top_k, mode, weights)
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

    def save(self, folder: Path, identity: ModelIdentity, *, overwrite: bool = False) -> None:
        """See `rag_demo.retriever.LocalRetriever.save`."""
        place = folder.resolve()
        with self._change() as snapshot, IndexWriter(folder, start_over=overwrite) as writer:
            committed, known = writer.manifest, self._saved.get(place, {})
            before = None if committed is None else known.get(committed.commit)
            if committed is not None and before is None and not overwrite and (
                known or committed.source is not None or not committed.model.is_same(identity)
            ):  # fmt: skip
                what = "has changed since it was" if known else "was not"
                raise IndexChangedError(
                    f"the index in '{place}' {what} loaded or saved here; load it and repeat the "
                    "changes, or replace it with overwrite=True"
                )
            if committed is not None and before is None and not overwrite:
                _ = writer.contents  # A damaged index is not replaced.
            now = Known(snapshot.origin, snapshot.owners, snapshot.next_number)
            present = Known(snapshot.origin)
            if before is None or overwrite or before.origin is not snapshot.origin:
                writer.clear(identity, snapshot.words.language)
            elif before.next_number < now.next_number or (before.owners != now.owners).any():
                present = before
            else:
                return  # Nothing has changed, so other writers keep their state.
            writer.documents.insert(snapshot.documents.stream(snapshot.alive, present.next_number))
            writer.write(snapshot, present.owners, snapshot.vectors.take)
            # After an interrupt it is unknown which of the two states the folder has.
            self._saved[place] = {writer.next_commit: now}
            if committed is not None and before is not None:
                self._saved[place][committed.commit] = before
            writer.commit(words=snapshot.words.folder)

    def load(
        self, folder: Path, identity: ModelIdentity | None = None, *, check: bool = False
    ) -> int:
        """See `rag_demo.retriever.LocalRetriever.load`. Without an identity, accept any model."""
        with contextlib.ExitStack() as stack:
            saved = SavedIndex(folder)
            stack.callback(saved.close)
            if identity is not None:
                refuse_other_model(folder, saved.manifest.model, identity)
            if check:
                saved.check_vectors()
            loaded = Snapshot.load(self._snapshot.vectors, saved)
            with self._change():
                known = Known(loaded.origin, loaded.owners, loaded.next_number)
                stack.pop_all()  # Before it is used: an interrupt must not close its files.
                self._snapshot = loaded
                # Last: what is not loaded is not known, so `save` does not replace it.
                self._saved[folder.resolve()] = {saved.manifest.commit: known}
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
            snapshot.close()
            self._saved = {}
            self._snapshot = snapshot.emptied()
            return snapshot.vectors


def search(
    snapshot: Snapshot,
    queries: Sequence[str],
    vectors: Vectors | None,
    where: Where | None,
    top_k: int,
    mode: str,
    weights: tuple[float, float],
) -> list[list[SearchResult]]:
    """Return the answers to each query; see `rag_demo.stores.store.Store.search`."""
    allowed = None
    if where is not None:
        allowed = snapshot.documents.matching(where, snapshot.alive)
    elif snapshot.count < len(snapshot.alive):
        allowed = snapshot.alive
    count = snapshot.count if allowed is None else int(np.count_nonzero(allowed))
    if not count:
        return [[] for _ in queries]
    if mode == "bm25" or vectors is None:
        best = _by_words(snapshot, queries, allowed, top_k)
    elif mode == "dense":
        best = _by_vectors(snapshot, vectors, allowed, min(top_k, count))
    else:
        depth = max(top_k, FUSED_FROM)
        near = _by_vectors(snapshot, vectors, allowed, min(depth, count))
        worded = _by_words(snapshot, queries, allowed, depth)
        best = _fused(snapshot, near, worded, weights, top_k)
    return _results(snapshot, queries, best)


def _by_vectors(snapshot: Snapshot, queries: Vectors, allowed: Mask | None, wanted: int) -> Ranked:
    """Find the ``wanted`` best documents for each query by their vectors."""
    vectors, owners = snapshot.vectors, snapshot.owners
    rows = None
    if allowed is not None:
        rows = np.asarray(np.append(allowed, False)[owners], bool)  # GONE is the last place.
    check_dimension(queries, vectors.dimension)
    available = len(vectors) if rows is None else int(np.count_nonzero(rows))
    depth = wanted

    def order_of(rows: Rows) -> Rows:
        return snapshot.order_of(owners[rows])

    while True:  # Until the rows belong to as many documents as are wanted.
        pairs = vectors.candidates(queries, depth, rows, order_of)
        ranked = rank(vectors.take, queries, pairs, depth, order_of)
        best = best_of_each(ranked, owners[ranked.items]).first(wanted)
        if depth == available or (np.diff(best.starts) == wanted).all():
            return best
        depth = min(4 * depth, available)


def _by_words(
    snapshot: Snapshot, queries: Sequence[str], allowed: Mask | None, top_k: int
) -> Ranked:
    """Find the best documents for each query by full text."""
    snapshot.words.catch_up(snapshot.documents, snapshot.alive)
    counts = snapshot.alive if allowed is None else allowed
    found = (snapshot.words.search(query, counts, top_k) for query in queries)
    return Ranked.join([best_scores(*each, top_k, snapshot.order_of) for each in found])


def _fused(
    snapshot: Snapshot, near: Ranked, worded: Ranked, weights: tuple[float, float], top_k: int
) -> Ranked:
    """Fuse the ranks by vectors and by full text."""
    fused, rows = [], []
    for first, second in zip(near.each(), worded.each(), strict=True):
        items = near.items[first].tolist()
        score_of = fused_scores([items, worded.items[second].tolist()], weights)
        numbers = np.fromiter(score_of, np.int64, len(score_of))
        scores = np.fromiter(score_of.values(), float, len(score_of))
        fused.append(best_scores(numbers, scores, top_k, snapshot.order_of))
        row_of = dict(zip(items, near.rows[first].tolist(), strict=True))
        rows += [row_of.get(number, -1) for number in fused[-1][0].tolist()]
    return replace(Ranked.join(fused), rows=np.asarray(rows, np.int64))


def _results(snapshot: Snapshot, queries: Sequence[str], best: Ranked) -> list[list[SearchResult]]:
    documents = snapshot.documents.get(best.items.tolist())
    if not documents:
        return [[] for _ in queries]
    places = np.arange(1, len(documents) + 1) - np.repeat(best.starts[:-1], np.diff(best.starts))
    spans = snapshot.spans[best.rows].tolist()
    passages = [(a, b) if b and row >= 0 else None
                for (a, b), row in zip(spans, best.rows.tolist(), strict=True)]  # fmt: skip
    only_words = np.flatnonzero(best.rows < 0)
    spans_of = _spans_of(snapshot, best.items[only_words]) if len(only_words) else {}
    query_of = np.repeat(np.arange(len(queries)), np.diff(best.starts))
    for place in only_words.tolist():
        if known := spans_of.get(int(best.items[place])):
            query, text = queries[query_of[place]], documents[place].text
            passages[place] = best_span(query, text, known, snapshot.words.language)
    ids, texts, metadata, _ = zip(*documents, strict=True)
    fields = zip(places.tolist(), best.scores.tolist(), ids, texts, metadata, passages, strict=True)
    results = list(itertools.starmap(SearchResult, fields))
    return [results[part] for part in best.each()]


def _spans_of(snapshot: Snapshot, numbers: Rows) -> dict[int, list[tuple[int, int]]]:
    """Return the passages of documents that have any."""
    owners, spans = snapshot.owners, snapshot.spans
    rows = np.flatnonzero(np.isin(owners, numbers) & (spans[:, 1] > 0))
    spans_of: dict[int, list[tuple[int, int]]] = {}
    for owner, (start, stop) in zip(owners[rows].tolist(), spans[rows].tolist(), strict=True):
        spans_of.setdefault(owner, []).append((start, stop))
    return spans_of


@dataclass(frozen=True)
class Ranked:
    """The best items of several queries, query after query, the best items first.

    Attributes:
        starts: Where the items of each query begin, and where the last ones end: shape (b + 1,).
        items: Rows or documents: shape (n,).
        scores: Shape (n,).
        rows: The row of each item's score, or -1: shape (n,).
    """

    starts: Rows
    items: Rows
    scores: Scores
    rows: Rows

    @classmethod
    def join(cls, several: Sequence[tuple[Rows, Scores]]) -> Ranked:
        """Join the items and scores of several queries, without rows."""
        starts = np.cumsum([0, *(len(items) for items, _ in several)])
        items = np.concatenate([items for items, _ in several] or [np.empty(0, np.int64)])
        scores = np.concatenate([scores for _, scores in several] or [np.empty(0)])
        return cls(starts, items, scores, np.full(len(items), -1))

    def each(self) -> Iterator[slice]:
        """Yield the places of each query's items."""
        return itertools.starmap(slice, itertools.pairwise(self.starts.tolist()))

    def first(self, count: int) -> Ranked:
        """Keep the first ``count`` items of each query."""
        widths = np.diff(self.starts)
        if (widths <= count).all():
            return self
        places = np.arange(len(self.items)) - np.repeat(self.starts[:-1], widths)
        return self.only(places < count)

    def only(self, chosen: Mask) -> Ranked:
        """Keep the chosen items: shape (n,)."""
        starts = np.concatenate([[0], np.cumsum(chosen)])[self.starts]
        return Ranked(starts, self.items[chosen], self.scores[chosen], self.rows[chosen])


def rank(
    vectors_of: Callable[[Rows], Vectors],
    queries: Vectors,
    pairs: Pairs,
    top_k: int,
    order_of: Order,
) -> Ranked:
    """Order candidates by their exact scores.

    Args:
        vectors_of: Returns the vectors of rows: shape (p, d).
        queries: Shape (b, d).
        pairs: The candidates.
        top_k: How many rows of each query, at most.
        order_of: Orders rows that tie.

    Returns:
        The best rows of each query with their scores.
    """
    query, row, scores = pairs
    if scores is None:
        scores = exact_scores(vectors_of, queries, query, row)
    order = np.lexsort((-scores, query))
    row, scores = row[order], scores[order]
    starts = np.searchsorted(query, np.arange(len(queries) + 1))
    is_tie = (scores[1:] == scores[:-1]) & (query[1:] == query[:-1])
    is_among_best = np.arange(len(row) - 1) - starts[query[:-1]] < top_k
    if (is_tie & is_among_best).any():
        is_tie &= np.isin(query[:-1], query[:-1][is_tie & is_among_best])
        places = np.zeros(len(row), np.int64)
        tied = np.append(is_tie, False) | np.append(False, is_tie)
        places[tied] = order_of(row[tied])
        row = row[np.lexsort((row, places, -scores, query))]
    return Ranked(starts, row, scores, row).first(top_k)


def best_of_each(ranked: Ranked, owners: Rows) -> Ranked:
    """Turn rows into documents, and keep the best row of each document.

    Args:
        ranked: Rows.
        owners: The number of each row's document: shape (n,).
    """
    query = np.repeat(np.arange(len(ranked.starts) - 1), np.diff(ranked.starts))
    # The first call of np.unique imports modules, which takes longer than a search.
    pair = query * (int(owners.max(initial=0)) + 1) + owners
    order = np.argsort(pair, kind="stable")
    chosen = np.zeros(len(owners), bool)
    chosen[order] = np.diff(pair[order], prepend=-1) != 0
    return Ranked(ranked.starts, owners, ranked.scores, ranked.rows).only(chosen)


def best_scores(numbers: Rows, scores: Scores, top_k: int, order_of: Order) -> tuple[Rows, Scores]:
    """Order documents by their scores, and equal scores by id.

    Args:
        numbers: The numbers of different documents: shape (n,).
        scores: Shape (n,).
        top_k: How many documents at most.
        order_of: Orders documents that tie.
    """
    if len(numbers) > top_k:
        kept = scores >= np.partition(scores, -top_k)[-top_k]
        numbers, scores = numbers[kept], scores[kept]
    best = np.lexsort((order_of(numbers), -scores))[:top_k]
    return numbers[best], scores[best]
