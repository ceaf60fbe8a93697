"""The interface of stores: where a `rag_demo.Retriever` keeps and searches its documents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import short_repr
from rag_demo.reading.document import Document
from rag_demo.search_request import SearchRequest, SearchResult, Stats
from rag_demo.stores.filters import Where
from rag_demo.vectors import Rows, Vectors


@dataclass(frozen=True)
class EmbeddedBatch:
    """Documents with their vectors: what embedding makes, and what a store takes.

    Attributes:
        documents: Documents with different ids.
        owners: The place in ``documents`` of each vector's document: shape (n,), int64.
        spans: Start and stop of each vector's passage; 0 and 0 for the whole: shape (n, 2), int32.
        vectors: Shape (n, d), float32, each of length 1.
        identity: The model that made the vectors; None if it is unknown.
    """

    documents: Sequence[Document]
    owners: Rows
    spans: Any
    vectors: Vectors
    identity: ModelIdentity | None

    @classmethod
    def without_vectors(cls, documents: Sequence[Document]) -> EmbeddedBatch:
        """Return a batch that only replaces metadata and files; see `Store.upsert`."""
        spans, vectors = np.empty((0, 2), np.int32), np.empty((0, 1), np.float32)
        return cls(documents, np.empty(0, np.int64), spans, vectors, None)

    def with_unused_ids(
        self, taken: Callable[[Sequence[str]], Collection[str]], number: int
    ) -> EmbeddedBatch:
        """Return the same batch with ids that no document has: whole numbers from a number on."""
        ids: list[str] = []
        while missing := len(self.documents) - len(ids):
            tried = [str(n) for n in range(number, number + missing)]
            number, used = number + missing, taken(tried)
            ids += [name for name in tried if name not in used]
        pairs = zip(self.documents, ids, strict=True)
        return replace(self, documents=[each._replace(id=name) for each, name in pairs])

    @property
    def has_vectors(self) -> Any:
        """Whether each document has a vector: shape (len(documents),), bool."""
        return np.bincount(self.owners, minlength=len(self.documents)) > 0


def no_vectors(name: str) -> ValueError:
    """Make the error for a document without vectors that replaces none; see `Store.upsert`."""
    return ValueError(
        f"the document {short_repr(name)} has no vectors, and the store has no document with this "
        "id and text; embed it"
    )


class Store(Protocol):
    """Documents with their vectors, for any number of threads.

    `tests/rag_demo/contract.py` shows what a store must do. A change is all or nothing, and each
    search sees one state.
    """

    @property
    def identity(self) -> ModelIdentity | None:
        """The model that made the vectors; None while that is unknown."""

    @property
    def count(self) -> int:
        """How many documents there are."""

    def stats(self) -> Stats:
        """Return the size of the store."""

    def upsert(self, batch: EmbeddedBatch, *, choose_ids: bool = False) -> list[str]:
        """Add documents. A document replaces an older one with its id.

        A document without vectors only replaces the metadata and the file of the older one, which
        must have the same text and keeps its vectors.

        Args:
            batch: The documents.
            choose_ids: Whether to give each document an id that no document has: a whole number,
                in decimal digits.

        Returns:
            The ids.

        Raises:
            ValueError: The vectors have another dimension than the present ones, or a document
                without vectors has no older one with its id and text. Nothing was changed.
            ModelMismatchError: Another model made the present vectors.
        """

    def delete(self, ids: Sequence[str]) -> int:
        """Remove documents, and return how many there were. Unknown ids are ignored."""

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """Return a document for each id; None for an unknown one."""

    def ids(self) -> Iterator[str]:
        """Yield the ids of all documents, each once."""

    def matching(
        self, where: Where | None, after: str | None = None, limit: int | None = None
    ) -> list[str]:
        """Return the ids of documents that match a filter, ordered.

        Args:
            where: The filter; None for all documents.
            after: Only ids after this one, which need not exist.
            limit: How many at most.
        """

    def search(self, request: SearchRequest) -> list[list[SearchResult]]:
        """Find the best documents for each query; equal scores are ordered by id."""

    def close(self) -> object:
        """Wait for running calls, and give up all that is held; later calls raise an error."""
