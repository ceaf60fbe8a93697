"""A snapshot of a local store: its documents and their vectors at one moment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from rag_demo.encoding.model_identity import ModelIdentity, refuse_other_vectors
from rag_demo.exact_search.exact_scores import Pairs
from rag_demo.stores.documents import DocumentTable
from rag_demo.stores.filters import Where
from rag_demo.stores.index_folder import GONE, SavedIndex, temporary_documents
from rag_demo.stores.store import EmbeddedBatch, batches_of, places_of_older
from rag_demo.stores.words import TextIndex
from rag_demo.vectors import GrowableRows, Mask, Rows, Vectors, renumbered

_MANY_TIES = 1 << 10
_MOST_GONE = 1 << 10  # rows or numbers of deleted documents that are never worth a copy


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

    def candidates(self, queries: Vectors, top_k: int, allowed: Mask | None) -> Pairs:
        """Find the ``top_k`` best rows of each query, and all that might tie with them.

        Args:
            queries: Shape (b, d), each of length 1.
            top_k: How many, at most as many as are allowed.
            allowed: Which rows to search: shape (rows,); None for all.
        """

    @property
    def stays_in_file(self) -> bool:
        """Whether the vectors stay in a file because they exceed the memory budget."""

    def storage(self) -> tuple[str, str, int]:
        """Return the device, the dtype that is searched, and the bytes of the vectors."""


@dataclass(frozen=True)
class Snapshot:
    """Documents, their rows of vectors, and which of them still exist.

    Snapshots never change: `with_batch` and `without` return others, or raise. Each document has a
    number. Replacing or deleting a document only marks its number. When more than half of the rows
    belong to such documents, the others are copied and get new numbers.

    Attributes:
        vectors: One row for each whole document and for each of its passages.
        documents: The documents, by number.
        words: The full-text index. It learns of new documents when it is searched.
        owners: The number of each row's document: int64.
        spans: Start and stop of each row's passage; 0 and 0 for the whole: shape (rows, 2).
        alive: Whether the document of each number exists: bool.
        count: How many documents exist.
        identity: The model that made the vectors.
        saved: The saved index with the first documents, or None.
        origin: The same object in all snapshots that share their numbers.
        order: The place of each document in the order of ids, once it is needed.
    """

    vectors: VectorRows
    documents: DocumentTable
    words: TextIndex
    owners: GrowableRows = field(default_factory=lambda: GrowableRows(np.empty(0, np.int64)))
    spans: GrowableRows = field(default_factory=lambda: GrowableRows(np.empty((0, 2), np.int32)))
    alive: GrowableRows = field(default_factory=lambda: GrowableRows(np.empty(0, bool)))
    count: int = 0
    identity: ModelIdentity | None = None
    saved: SavedIndex | None = None
    origin: object = field(default_factory=object)
    order: list[Rows] = field(default_factory=list, init=False)

    @classmethod
    def empty(cls, vectors: VectorRows, language: str) -> Snapshot:
        """Return a snapshot without documents."""
        return cls(vectors.empty_copy(), temporary_documents(), TextIndex(language))

    def emptied(self) -> Snapshot:
        """Return a snapshot without documents, with the same settings."""
        return Snapshot.empty(self.vectors, self.words.language)

    @classmethod
    def load(cls, vectors: VectorRows, saved: SavedIndex) -> Snapshot:
        """Return the snapshot of a saved index. Its files are read when they are needed."""
        manifest = saved.manifest
        return cls(
            vectors.with_saved_rows(saved),
            saved.documents,
            TextIndex(manifest.language, saved.words, saved.words_index),
            GrowableRows(saved.owners),
            GrowableRows(saved.passages),
            GrowableRows(saved.alive),
            manifest.count,
            manifest.model if manifest.rows else None,
            saved,
        )

    @property
    def key(self) -> tuple[object, int, int]:
        """What a store keeps of a saved snapshot, which holds no vectors in memory."""
        return self.origin, len(self.owners), self.next_number

    @property
    def next_number(self) -> int:
        """The number of the next document."""
        return len(self.alive)

    def with_batch(self, batch: EmbeddedBatch) -> Snapshot:
        """Add documents; a document replaces an older one with its id.

        Raises:
            ValueError, ModelMismatchError: See `Store.upsert`.
        """
        refuse_other_vectors(self.identity if self.count else None, batch.identity)
        older = self.find([document.id for document in batch.documents])
        taken = places_of_older(batch, older, self.documents.get)
        here = self._without(list(taken))
        if not here.count and all(place < 0 for place in taken.values()):
            here = self.emptied()
            taken = {}
        dimension = here.vectors.dimension
        if dimension and len(batch.vectors) and batch.vectors.shape[1] != dimension:
            raise ValueError(
                f"the model's vectors have {batch.vectors.shape[1]} dimensions, "
                f"but the retriever has {dimension}; use the model that made its vectors"
            )
        first = here.next_number
        here.documents.replace_from(first, batch.documents)
        new_owners = {number: first + place for number, place in taken.items() if place >= 0}
        owners = here.owners
        if new_owners:
            owners = GrowableRows(renumbered(owners.rows, new_owners, first))
        return replace(
            here,
            vectors=here.vectors.extended(batch.vectors) if len(batch.vectors) else here.vectors,
            owners=owners.append(batch.owners + first),
            spans=here.spans.append(batch.spans),
            alive=here.alive.append(np.ones(len(batch.documents), bool)),
            count=here.count + len(batch.documents),
            identity=here.identity or batch.identity,
        )._tidied()

    def without(self, ids: Sequence[str]) -> Snapshot:
        """Remove documents; unknown ids are ignored."""
        return self._without(list(self.find(ids).values()))._tidied()

    def _without(self, numbers: Sequence[int]) -> Snapshot:
        if not numbers:
            return self
        alive = self.alive.rows.copy()
        alive[numbers] = False
        return replace(self, alive=GrowableRows(alive), count=self.count - len(numbers))

    def _tidied(self) -> Snapshot:
        """Copy the documents that exist if most of the rows belong to others."""
        if not self.count:
            return self.emptied()
        gone = len(self.owners) - int(np.count_nonzero(self.live_rows))
        unused = len(self.alive) - self.count  # numbers of deleted and of changed documents
        is_worth_it = 2 * gone > max(len(self.owners), _MOST_GONE) or (
            2 * unused > max(len(self.alive), _MOST_GONE)
        )
        if self.vectors.stays_in_file or not is_worth_it:
            return self
        return self.copied()

    def copied(self) -> Snapshot:
        """Return a copy with new numbers and without rows of deleted documents."""
        new = self.emptied()
        for batch in self.batches():
            new = new.with_batch(batch)
        return new

    def batches(self) -> Iterator[EmbeddedBatch]:
        """Yield all documents with their vectors."""
        parts = self.documents, self.live_owners, self.spans.rows, self.alive.rows
        return batches_of(*parts, self.vectors.take, self.identity)

    @property
    def live_rows(self) -> Mask:
        """Whether each row belongs to a document that exists: shape (rows,)."""
        return self.rows_of(self.alive.rows)

    @property
    def live_owners(self) -> Rows:
        """The number of each row's document, or `GONE`: shape (rows,)."""
        return np.where(self.live_rows, self.owners.rows, GONE)

    def rows_of(self, allowed: Mask) -> Mask:
        """Turn a mask of documents into a mask of rows."""
        owners = self.owners.rows
        return np.asarray(np.append(allowed, False)[owners], bool)  # GONE is -1.

    def find(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the numbers of the existing documents with these ids."""
        return self.documents.find(ids, self.alive.rows) if self.count else {}

    def order_of(self, numbers: Rows) -> Rows:
        """Return numbers that order documents by id."""
        if len(numbers) < _MANY_TIES:
            ids = self.documents.ids(numbers)
            place_of = {name: place for place, name in enumerate(sorted(set(ids)))}
            return np.asarray([place_of[name] for name in ids], np.int64)
        if not self.order:
            alive = np.flatnonzero(self.alive.rows)
            ids = self.documents.ids(alive)
            places = np.empty(self.next_number, np.int64)
            places[alive[sorted(range(len(ids)), key=ids.__getitem__)]] = np.arange(len(ids))
            self.order.append(places)  # Any search may store it.
        result: Rows = self.order[0][numbers]
        return result

    def matching(self, where: Where | None) -> Mask | None:
        """Tell which document numbers exist and match a filter; None if all do."""
        if where is not None:
            return self.documents.matching(where, self.alive.rows)
        alive: Mask = self.alive.rows
        return None if self.count == len(alive) else alive

    def catch_up_words(self) -> None:
        """Add the missing documents to the full-text index.

        Raises:
            RagDemoError: tantivy or PyStemmer is not installed, or the disk is full.
        """
        self.words.catch_up(
            self.next_number,
            lambda start: (
                (number, each.text)
                for number, each in self.documents.stream(start)
                if number < self.next_number and self.alive.rows[number]
            ),
        )

    def close(self) -> None:
        """Close all files and databases. Nothing may be using these."""
        self.words.close()
        self.documents.close()
        if self.saved is not None:
            self.saved.close()
