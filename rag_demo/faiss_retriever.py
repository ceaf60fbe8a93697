"""FaissRetriever: the same interface on faiss's exact index."""

from __future__ import annotations

from typing import cast

from rag_demo.retriever import BasicEmbedder, Retriever
from rag_demo.searching.faiss_vectors import FaissVectors
from torch_utils import release
from torch_utils.resource import closes_on_error

__all__ = ["FaissRetriever"]


class FaissRetriever(Retriever):
    """Exact cosine top-k with ``faiss.IndexFlatIP``, on the CPU. See `Retriever`.

    Args:
        embedding_model: What turns texts into vectors; it is not closed with this.
    """

    @closes_on_error
    def __init__(self, embedding_model: BasicEmbedder) -> None:
        super().__init__(embedding_model, FaissVectors())  # Opens an index with the first `add`.

    def _release(self) -> None:
        # Runs once, while faiss is intact: at close, when this is garbage, at exit at the latest.
        if not hasattr(self, "_held"):
            return  # `__init__` has refused its arguments.
        with self._lock:
            index = cast(FaissVectors, self._held.vectors).index
            super()._release()
            # What leads to the index from elsewhere keeps no vectors: it is emptied in place.
            release(index)
