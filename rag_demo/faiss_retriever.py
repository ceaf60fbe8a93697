"""FaissRetriever: the same interface with faiss's exact index.

`FaissVectors.extended` creates a ``faiss.IndexFlatIP`` and adds to it, `candidates` searches it,
and `FaissRetriever._release` releases its memory in place.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from rag_demo.retriever import BasicEmbedder, LocalRetriever
from rag_demo.search_request import Order
from rag_demo.stores.index_folder import SavedIndex
from rag_demo.stores.local import LocalStore
from rag_demo.vectors import Mask, Pairs, Rows, Vectors, exact_scores, rounding
from torch_utils import closes_on_error, release

__all__ = ["FaissRetriever"]

_EXTRA = 8  # more rows than wanted, to see whether the last one is a tie


class FaissRetriever(LocalRetriever):
    """Exact cosine search with ``faiss.IndexFlatIP`` on the CPU; see `Retriever` for the methods.

    Searches take turns with each other and with `add`, because faiss changes the index in place
    and searches with all threads.

    Args:
        embedding_model: The embedding model. The retriever does not own it and does not close it.
        language: See `PyTorchGPURetriever`.
    """

    @closes_on_error
    def __init__(self, embedding_model: BasicEmbedder, *, language: str = "english") -> None:
        super().__init__(embedding_model, LocalStore(FaissVectors(), language))

    def _release(self) -> None:
        # Runs once, while faiss is intact: at close, at garbage collection, or at exit.
        if hasattr(self, "store"):  # `__init__` may have raised.
            index = cast(FaissVectors, self.store.close()).index
            if index is not None:
                index.codes = type(index.codes)()  # As `reset`, which keeps the memory for later.
                index.ntotal = 0
                release()  # Trims the heap; faiss allocates outside of torch.


@dataclass(frozen=True)
class FaissVectors:
    """The first ``count`` vectors of an ``IndexFlatIP``; see `VectorRows`.

    Attributes:
        index: The index, or None without vectors. An interrupted change or a later snapshot may
            have added more vectors.
        count: How many vectors belong to this snapshot.
        lock: The lock of the index.
    """

    index: Any = None
    count: int = 0
    lock: Any = field(default_factory=threading.RLock)
    stays_in_file = False

    def __len__(self) -> int:
        return self.count

    @property
    def dimension(self) -> int:
        """See `VectorRows`."""
        return 0 if self.index is None else int(self.index.d)

    def extended(self, vectors: Vectors) -> FaissVectors:
        """See `VectorRows`."""
        import faiss

        index = faiss.IndexFlatIP(vectors.shape[1]) if self.index is None else self.index
        with self.lock:
            if index.ntotal > self.count:
                index.remove_ids(faiss.IDSelectorRange(self.count, index.ntotal))
            index.add(np.ascontiguousarray(vectors))
        return FaissVectors(index, self.count + len(vectors), self.lock)

    def with_saved_rows(self, saved: SavedIndex) -> FaissVectors:
        """See `VectorRows`."""
        return self.extended(saved.vectors) if len(saved.vectors) else self

    def take(self, rows: Rows) -> Vectors:
        """See `VectorRows`."""
        with self.lock:
            vectors: Vectors = self.index.reconstruct_batch(rows)
        return vectors

    def storage(self) -> tuple[str, str, int]:
        """See `VectorRows`."""
        return "cpu", "float32", 4 * self.count * self.dimension

    def candidates(self, queries: Vectors, top_k: int, allowed: Mask | None, order: Order) -> Pairs:
        """See `VectorRows`."""
        with self.lock:
            if self.index.ntotal > self.count:
                allowed = np.ones(self.count, bool) if allowed is None else allowed
            options, available = {}, self.count
            if allowed is not None:
                options, available = {"params": _selector(allowed)}, int(allowed.sum())
            wanted = min(top_k + _EXTRA, available)
            scores, rows = self.index.search(queries, wanted, **options)
            found: list[Rows] = []
            for query, bar in enumerate(scores[:, top_k - 1] - rounding(queries.shape[1])):
                near = rows[query][scores[query] >= bar]
                if len(near) == wanted < available:  # There may be more ties.
                    one = queries[query : query + 1]
                    _, _, near = self.index.range_search(one, float(bar), **options)
                found.append(near)
        pairs = np.repeat(np.arange(len(queries)), list(map(len, found))), np.concatenate(found)
        return Pairs(*pairs, exact_scores(self.take, queries, *pairs))


def _selector(allowed: Mask) -> Any:
    import faiss

    # The stubs know neither SWIG's keywords nor that the bitmap may be an array.
    selector: Any = faiss.IDSelectorBitmap
    parameters: Any = faiss.SearchParameters
    return parameters(sel=selector(np.packbits(allowed, bitorder="little")))
