"""ShardedRetriever: several indexes searched as one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress

import numpy as np

from rag_demo.documents.document import Document
from rag_demo.encoding.model_identity import ModelIdentity, refuse_other_vectors
from rag_demo.retriever import Retriever
from rag_demo.searching.results import SearchResult, Stats
from rag_demo.stores.filters import Where
from rag_demo.stores.ranking import by_mode
from rag_demo.stores.store import EmbeddedBatch, unused_ids
from rag_demo.vectors import Vectors
from torch_utils import closes_on_error

__all__ = ["ShardedRetriever"]


class ShardedRetriever(Retriever):
    """Search several retrievers as one; see `Retriever` for the methods.

    Dense answers are exact. BM25 uses each shard's own counts of words, not global ones, so scores
    of words are comparable if the shards hold similar documents. Ids must differ between shards.
    New documents go to the smallest shard, and changed ones stay where they are. Calls take turns,
    so a search sees one state. A change that fails in one shard may stay in others.

    Args:
        shards: Retrievers of the same embedding model. They are owned: closing this closes them.

    Raises:
        ValueError: There are no shards.
        ModelMismatchError: The shards were made with different models.
    """

    @closes_on_error
    def __init__(self, shards: Sequence[Retriever]) -> None:
        self.shards = list(shards)
        if not self.shards:
            raise ValueError("shards must have at least one retriever, got none")
        super().__init__(self.shards[0].embedding_model, ShardedStore(self.shards))
        self.store.identity  # noqa: B018  (the models are compared)


class ShardedStore:
    """A `Store` over those of retrievers, which it closes."""

    def __init__(self, shards: Sequence[Retriever]) -> None:
        self._shards, self._stores = shards, [each.store for each in shards]
        self._lock = threading.RLock()

    @property
    def identity(self) -> ModelIdentity | None:
        """See `Store`."""
        found = [each.identity for each in self._stores if each.count]
        for each in found:
            refuse_other_vectors(found[0], each)
        return found[0] if found else None

    @property
    def count(self) -> int:
        """See `Store`."""
        return sum(each.count for each in self._stores)

    def stats(self) -> Stats:
        """See `Store`."""
        every = [each.stats() for each in self._stores]
        fullest = max(every, key=lambda each: each.size)
        return replace(fullest, size=self.count, nbytes=sum(each.nbytes for each in every))

    def upsert(self, batch: EmbeddedBatch, *, choose_ids: bool = False) -> list[str]:
        """See `Store`."""
        with self._lock:
            refuse_other_vectors(self.identity, batch.identity)
            if choose_ids:
                batch = batch.with_ids(unused_ids(self._found, self.count, len(batch.documents)))
            ids = [each.id for each in batch.documents]
            smallest = int(np.argmin([each.count for each in self._stores]))
            shards = np.full(len(ids), smallest)
            for n, store in enumerate(self._stores):
                shards[[each is not None for each in store.get(ids)]] = n
            for n in np.unique(shards).tolist():
                chosen = shards == n
                rows, places = chosen[batch.owners], np.cumsum(chosen) - 1
                some, owners = list(compress(batch.documents, chosen)), places[batch.owners[rows]]
                spans, vectors = batch.spans[rows], batch.vectors[rows]
                part = EmbeddedBatch(some, owners, spans, vectors, batch.identity)
                self._stores[n].upsert(part)
            return ids

    def delete(self, ids: Sequence[str]) -> int:
        """See `Store`."""
        with self._lock:
            return sum(each.delete(ids) for each in self._stores)

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """See `Store`."""
        with self._lock:
            found = self._found(ids)
        return [found.get(name) for name in ids]

    def _found(self, ids: Sequence[str]) -> dict[str, Document]:
        every = chain.from_iterable(store.get(ids) for store in self._stores)
        return {each.id: each for each in every if each is not None}

    def ids(self) -> Iterator[str]:
        """See `Store`."""
        with self._lock:
            return chain.from_iterable([each.ids() for each in self._stores])

    def matching(
        self, where: Where | None, after: str | None = None, limit: int | None = None
    ) -> list[str]:
        """See `Store`."""
        with self._lock:
            every = [each.matching(where, after, limit) for each in self._stores]
        return sorted(chain(*every))[:limit]

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

        def best(part: str, depth: int) -> list[list[SearchResult]]:
            queries = vectors if part == "dense" else None
            every = [each.search(texts, queries, where, depth, part) for each in self._stores]
            return [
                sorted(chain(*parts), key=lambda each: (-each.score, each.id))[:depth]
                for parts in zip(*every, strict=True)
            ]

        with self._lock:
            found = by_mode(mode, best, weights, top_k)
        return [[each._replace(rank=n) for n, each in enumerate(one, start=1)] for one in found]

    def close(self) -> None:
        """Close all retrievers, even if one fails."""
        with contextlib.ExitStack() as stack:
            for each in self._shards:
                stack.callback(each.close)
