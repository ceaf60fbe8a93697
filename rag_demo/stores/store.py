"""The interface of stores: where a `rag_demo.Retriever` keeps and searches its documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rag_demo.documents.document import Document
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.searching.results import SearchResult, Stats
from rag_demo.stores.filters import Where
from rag_demo.vectors import Rows, Vectors


@dataclass(frozen=True)
class EmbeddedBatch:
    """Documents with their vectors: what embedding makes, and what a store takes.

    Attributes:
        documents: Documents with different ids.
        owners: The place in ``documents`` of each vector's document: shape (n,).
        spans: Start and stop of each vector's passage; 0 and 0 for the whole: shape (n, 2), int32.
        vectors: Shape (n, d), float32, each of length 1. Each document has one at least.
        identity: The model that made the vectors; None if it is unknown.
    """

    documents: Sequence[Document]
    owners: Rows
    spans: Any
    vectors: Vectors
    identity: ModelIdentity | None


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

        Args:
            batch: The documents.
            choose_ids: Whether to give each document an id that no document has.

        Returns:
            The ids.

        Raises:
            ValueError: The vectors have another dimension than the present ones.
        """

    def delete(self, ids: Sequence[str]) -> int:
        """Remove documents, and return how many there were. Unknown ids are ignored."""

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """Return a document for each id; None for an unknown one."""

    def ids(self) -> Iterator[str]:
        """Yield the ids of all documents, in the order in which they were added."""

    def search(
        self,
        queries: Sequence[str],
        vectors: Vectors | None,
        where: Where | None,
        top_k: int,
        mode: str,
    ) -> list[list[SearchResult]]:
        """Find the best documents for each query; equal scores are ordered by id.

        Args:
            queries: The queries.
            vectors: Their vectors: shape (b, d), each of length 1; None in the mode "bm25".
            where: The filter that documents must match.
            top_k: How many results at most.
            mode: "dense", "bm25" or "hybrid"; see `rag_demo.Retriever.search`.
        """

    def close(self) -> object:
        """Wait for running calls, and give up all that is held."""
