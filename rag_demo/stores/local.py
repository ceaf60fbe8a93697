"""LocalStore: documents in SQLite, vectors in memory or in a file, and words in tantivy."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from rag_demo.documents.document import Document
from rag_demo.encoding.model_identity import ModelIdentity, refuse_other_model
from rag_demo.errors import IndexChangedError, RagDemoError
from rag_demo.searching.results import SearchResult, Stats
from rag_demo.stores.filters import Where
from rag_demo.stores.index_folder import Manifest, SavedIndex
from rag_demo.stores.search import search
from rag_demo.stores.snapshot import Snapshot, VectorRows
from rag_demo.stores.store import EmbeddedBatch, unused_ids
from rag_demo.stores.words import check_language
from rag_demo.stores.writer import MOST_BEHIND, IndexWriter
from rag_demo.vectors import Vectors
from torch_utils import ResourceClosedError

_ROWS_AT_ONCE = 1 << 13
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
        # For each folder the commits that this store knows, with the origin, the rows and the
        # numbers of their snapshots.
        self._saved: dict[Path, dict[str, tuple[object, int, int]]] = {}

    @property
    def identity(self) -> ModelIdentity | None:
        """See `Store`."""
        return self._snapshot.identity

    @property
    def count(self) -> int:
        """See `Store`."""
        return self._snapshot.count

    @property
    def vectors(self) -> VectorRows:
        """The vectors of the current snapshot."""
        return self._snapshot.vectors

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
            self._snapshot = snapshot = snapshot.with_batch(batch)
            if snapshot.words.lacks(snapshot.next_number) >= _WORDS_BEHIND:
                # Else the first search by words would do it all.
                with contextlib.suppress(RagDemoError):  # For example, tantivy is not installed.
                    snapshot.catch_up_words()
            return [document.id for document in batch.documents]

    def delete(self, ids: Sequence[str]) -> int:
        """See `Store`."""
        with self._change() as snapshot:
            left = snapshot.without(ids)
            removed = snapshot.count - left.count
            self._snapshot = left
            return removed

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """See `Store`."""
        with self._search() as snapshot:
            return snapshot.documents.known(ids, snapshot.alive.rows)

    def ids(self) -> Iterator[str]:
        """See `Store`."""
        with self._search() as snapshot:
            return iter(snapshot.documents.ids(np.flatnonzero(snapshot.alive.rows)))

    def matching(self, where: Where) -> list[str]:
        """Return the ids of the documents that match a filter."""
        with self._search() as snapshot:
            allowed = snapshot.documents.matching(where, snapshot.alive.rows)
            return snapshot.documents.ids(np.flatnonzero(allowed))

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
            return search(snapshot, texts, vectors, where, top_k, mode, weights)

    def batches(self) -> Iterator[EmbeddedBatch]:
        """Yield all documents with their vectors, as they are at the first batch."""
        with self._search() as snapshot:
            batches = snapshot.batches()
        while True:
            with self._search():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    @contextlib.contextmanager
    def _change(self) -> Iterator[Snapshot]:
        with self._changing:
            self._ensure_open()
            yield self._snapshot

    @contextlib.contextmanager
    def _search(self) -> Iterator[Snapshot]:
        """Yield the snapshot. `close` waits until the block ends."""
        thread = threading.get_ident()
        try:
            self._searching.append(thread)  # Before the check: `close` waits for these.
            self._ensure_open()
            yield self._snapshot
        finally:
            with self._has_searched, contextlib.suppress(ValueError):  # An interrupt came before.
                self._searching.remove(thread)
                self._has_searched.notify_all()

    def _ensure_open(self) -> None:
        if self._is_closed:
            raise ResourceClosedError("this store is closed")

    def save(self, folder: Path, identity: ModelIdentity, *, overwrite: bool = False) -> None:
        """See `rag_demo.retriever.LocalRetriever.save`."""
        with self._changing, IndexWriter(folder, start_over=overwrite) as writer:
            self._ensure_open()
            place, committed = folder.resolve(), writer.manifest
            known = self._saved.get(place, {})
            before = None if committed is None else known.get(committed.commit)
            if committed is not None and before is None and not overwrite and (
                known or committed.source is not None or not committed.model.is_same(identity)
            ):  # fmt: skip
                what = "has changed since it was" if known else "was not"
                raise IndexChangedError(
                    f"the index in '{place}' {what} loaded or saved here; load it and repeat the "
                    "changes, or replace it with overwrite=True"
                )
            snapshot = self._snapshot
            if before is not None and before[0] is snapshot.origin and not writer.wastes_space:
                self._append(writer, snapshot, *before[1:])
            else:
                gone_rows = len(snapshot.owners) - int(np.count_nonzero(snapshot.live_rows))
                if 4 * gone_rows > len(snapshot.owners) and not snapshot.vectors.stays_in_file:
                    self._snapshot = snapshot = snapshot.copied()
                writer.clear(identity, language=snapshot.words.language)
                self._append(writer, snapshot, 0, 0)
                writer.catch_up_words(known=snapshot.words.folder(), most_behind=MOST_BEHIND)
            writer.describe(source=None, finished=True)
            # After an interrupt it is unknown which of the two states the folder has.
            self._saved[place] = {writer.prepare().commit: snapshot.key}
            if committed is not None and before is not None:
                self._saved[place][committed.commit] = before
            writer.commit()

    @staticmethod
    def _append(writer: IndexWriter, snapshot: Snapshot, row: int, number: int) -> None:
        """Write the rows from ``row`` on, and the documents from ``number`` on."""
        rows = np.arange(row, len(snapshot.owners))
        alive = snapshot.alive.rows
        pieces = (
            snapshot.vectors.take(rows[start : start + _ROWS_AT_ONCE])
            for start in range(0, len(rows), _ROWS_AT_ONCE)
        )
        documents = (each for each in snapshot.documents.stream(number) if alive[each[0]])
        spans = snapshot.spans.rows[row:]
        writer.append(documents, snapshot.live_owners, spans, pieces, snapshot.next_number)

    def load(self, folder: Path, identity: ModelIdentity | None = None) -> int:
        """See `rag_demo.retriever.LocalRetriever.load`. Without an identity, accept any model."""
        self._ensure_open()
        saved = SavedIndex(folder)
        try:
            manifest = saved.manifest
            if identity is not None:
                refuse_other_model(folder, manifest.model, identity)
            snapshot = Snapshot.load(self.vectors, saved)
        except BaseException:  # An interrupt must not leave it open.
            saved.close()
            raise
        with self._change():
            self._saved[folder.resolve()] = {manifest.commit: snapshot.key}
            self._snapshot = snapshot
            return snapshot.count

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
