"""Contents: which documents an index has, which vectors are theirs, and the one way to change that.

Each document has a number. A new document gets the next one, and so does a document that replaces
another. Each row of vectors has an owner: the number of its document, or `GONE`. A document exists
while it owns a row. Nothing else is changed, so older contents stay valid while a search uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rag_demo.encoding.model_identity import ModelIdentity, refuse_other_vectors
from rag_demo.errors import short_repr
from rag_demo.reading.document import Document
from rag_demo.stores.documents import DocumentTable
from rag_demo.stores.filters import Where
from rag_demo.stores.store import EmbeddedBatch
from rag_demo.vectors import Mask, Rows, Vectors

GONE = -1
"""The owner of a row whose document was deleted."""
_MOST_GONE = 1 << 10  # rows or numbers of deleted documents that are never worth a copy
_AT_ONCE = 1 << 11  # documents that are copied together

Passages = npt.NDArray[np.int32]
Self = TypeVar("Self", bound="Contents")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The documents of an index; `with_batch` and `without` return others, or raise.

    Attributes:
        documents: All documents, by number, also those that were replaced or deleted.
        owners: The number of each row's document, or `GONE`: int64.
        spans: Start and stop of each row's passage; 0 and 0 for the whole: shape (rows, 2).
        next_number: The number of the next document.
        identity: The model that made the vectors; None if it is unknown.
    """

    documents: DocumentTable
    owners: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    spans: Passages = field(default_factory=lambda: np.empty((0, 2), np.int32))
    next_number: int = 0
    identity: ModelIdentity | None = None

    @cached_property
    def alive(self) -> Mask:
        """Whether the document of each number exists: shape (next_number,)."""
        alive = np.zeros(self.next_number + 1, bool)
        alive[self.owners] = True  # `GONE` is the last place.
        return alive[:-1]

    @cached_property
    def count(self) -> int:
        """How many documents exist."""
        return int(np.count_nonzero(self.alive))

    @property
    def wastes_space(self) -> bool:
        """Whether deleted documents have more than half of the rows, or of the numbers."""
        return any(2 * np.count_nonzero(gone) > max(len(gone), _MOST_GONE)
                   for gone in (self.owners == GONE, ~self.alive))  # fmt: skip

    def with_batch(self: Self, batch: EmbeddedBatch) -> Self:
        """Add documents; a document replaces an older one with its id.

        The caller adds the vectors.

        Raises:
            ValueError, ModelMismatchError: See `rag_demo.stores.store.Store.upsert`.
        """
        refuse_other_vectors(self.identity if self.count else None, batch.identity)
        first, count = self.next_number, len(batch.documents)
        owners = self._owners_after(self._replaced(batch))
        self.documents.replace_from(first, batch.documents)
        return replace(
            self,
            owners=np.concatenate([owners, batch.owners + first]),
            spans=np.concatenate([self.spans, batch.spans]),
            next_number=first + count,
            identity=self.identity or batch.identity,
        )

    def _replaced(self, batch: EmbeddedBatch) -> dict[int, int]:
        """Return the older documents, each with the number that takes over its vectors, or GONE."""
        older = self.find([each.id for each in batch.documents])
        bare = [(place, batch.documents[place])
                for place in np.flatnonzero(~batch.has_vectors).tolist()]  # fmt: skip
        numbers = [older[document.id] for _, document in bare if document.id in older]
        text_of = {each.id: each.text for each in self.documents.get(numbers)}
        for _, document in bare:
            if text_of.get(document.id) != document.text:
                raise ValueError(
                    f"the document {short_repr(document.id)} has no vectors, and the store has no "
                    "document with this id and text; embed it"
                )
        takes_over = {document.id: self.next_number + place for place, document in bare}
        return {number: takes_over.get(name, GONE) for name, number in older.items()}

    def without(self: Self, ids: Sequence[str]) -> Self:
        """Remove documents; unknown ids are ignored."""
        return replace(
            self, owners=self._owners_after(dict.fromkeys(self.find(ids).values(), GONE))
        )

    def _owners_after(self, changes: Mapping[int, int]) -> Rows:
        """Return the owners of the rows after documents have given theirs away, or up."""
        if not changes:
            return self.owners
        new = np.arange(self.next_number + 1)
        new[-1] = GONE  # `GONE` is the last place.
        new[list(changes)] = list(changes.values())
        return np.asarray(new[self.owners], np.int64)

    def find(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the numbers of the existing documents with these ids."""
        return self.documents.find(ids, self.alive) if self.count else {}

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """Return a document for each id; None for an unknown one."""
        number_of = self.find(ids)
        found = dict(zip(number_of, self.documents.get(list(number_of.values())), strict=True))
        return [found.get(name) for name in ids]

    def matching(
        self, where: Where | None, after: str | None = None, limit: int | None = None
    ) -> list[str]:
        """Return the ids of documents that match a filter; see `Store.matching`."""
        return self.documents.page(self.documents.matching(where, self.alive), after, limit)

    def batches(self, take: Callable[[Rows], Vectors]) -> Iterator[EmbeddedBatch]:
        """Yield all documents with their vectors.

        Args:
            take: Returns the vectors of rows.
        """
        numbers, order = np.flatnonzero(self.alive), np.argsort(self.owners, kind="stable")
        ordered = self.owners[order]
        for start in range(0, len(numbers), _AT_ONCE):
            some = numbers[start : start + _AT_ONCE]
            first, last = np.searchsorted(ordered, [some[0], some[-1] + 1])
            rows = order[first:last]
            places: Any = np.searchsorted(some, self.owners[rows])
            documents = self.documents.get(some.tolist())
            yield EmbeddedBatch(documents, places, self.spans[rows], take(rows), self.identity)
