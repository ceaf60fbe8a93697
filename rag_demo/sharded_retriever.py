"""ShardedRetriever: several indexes searched as one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NoReturn

from rag_demo.encoding.model_identity import ModelIdentity, refuse_other_model
from rag_demo.errors import RagDemoError
from rag_demo.reading.document import Document
from rag_demo.retriever import Retriever
from rag_demo.searching import SearchRequest, SearchResult, Stats, by_mode
from rag_demo.stores.filters import Where
from torch_utils import closes_on_error

__all__ = ["ShardedRetriever"]


class ShardedRetriever(Retriever):
    """Search several retrievers as one; see `Retriever` for the methods.

    Dense answers are exact. BM25 uses each shard's own counts of words, not global ones, so scores
    of words are comparable if the shards hold similar documents. Ids must differ between shards.
    Change the shards themselves; a change of this is a `RagDemoError`.

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
    """A `Store` over those of retrievers, which it closes. It refuses changes."""

    def __init__(self, shards: Sequence[Retriever]) -> None:
        self._shards, self._stores = shards, [each.store for each in shards]

    @property
    def identity(self) -> ModelIdentity | None:
        """See `Store`."""
        found = [each.identity for each in self._stores if each.count]
        for each in found:
            refuse_other_model(found[0], each)
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

    def upsert(self, *_: object, **__: object) -> NoReturn:
        """Refuse a change."""
        raise RagDemoError("several indexes are searched as one, but changed one by one")

    delete = upsert

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """See `Store`."""
        every = chain.from_iterable(each.get(ids) for each in self._stores)
        found = {each.id: each for each in every if each is not None}
        return [found.get(name) for name in ids]

    def ids(self) -> Iterator[str]:
        """See `Store`."""
        return chain.from_iterable([each.ids() for each in self._stores])

    def matching(
        self, where: Where | None, after: str | None = None, limit: int | None = None
    ) -> list[str]:
        """See `Store`."""
        return sorted(chain(*(each.matching(where, after, limit) for each in self._stores)))[:limit]

    def search(self, request: SearchRequest) -> list[list[SearchResult]]:
        """See `Store`."""

        def best(part: str, depth: int) -> list[list[SearchResult]]:
            asked = request._replace(mode=part, top_k=depth)
            every = [each.search(asked) for each in self._stores]
            return [
                sorted(chain(*parts), key=lambda each: (-each.score, each.id))[:depth]
                for parts in zip(*every, strict=True)
            ]

        found = by_mode(request, best)
        return [[each._replace(rank=n) for n, each in enumerate(one, start=1)] for one in found]

    def close(self) -> None:
        """Close all retrievers, even if one fails."""
        with contextlib.ExitStack() as stack:
            for each in self._shards:
                stack.callback(each.close)
