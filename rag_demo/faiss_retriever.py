"""FaissRetriever: the same interface on faiss's exact index."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.retriever import Retriever
from rag_demo.searching.ranking import Pairs
from rag_demo.vectors import Rows, Vectors, rounding
from torch_utils import release

__all__ = ["FaissRetriever"]


class FaissRetriever(Retriever):
    """Exact cosine top-k with ``faiss.IndexFlatIP``, on the CPU. See `Retriever`.

    Args:
        embedding_model: What turns texts into vectors; it is not closed with this.
    """

    _index: Any = None

    def _append(self, vectors: Vectors) -> None:
        import faiss

        if self._index is None:
            self._index = faiss.IndexFlatIP(vectors.shape[1])
        self._index.add(np.ascontiguousarray(vectors))

    def _keep(self, rows: Rows) -> None:
        kept = self._vectors(rows)
        self._clear()
        if len(kept):
            self._append(kept)

    def _clear(self) -> None:
        self._index = None

    def _vectors(self, rows: Rows | None = None) -> Vectors:
        if self._index is None:
            return np.empty((0, 0), np.float32)
        vectors: Vectors
        if rows is None:
            vectors = self._index.reconstruct_n(0, self._index.ntotal)
        else:
            vectors = self._index.reconstruct_batch(rows)
        return vectors

    def _storage(self) -> tuple[str, str, int]:
        nbytes = 0 if self._index is None else 4 * self._index.ntotal * self._index.d
        return "cpu", "float32", nbytes

    def _candidates(
        self, queries: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> Pairs:
        import faiss

        available = self._index.ntotal
        options = {}
        if allowed is not None:
            rows = np.flatnonzero(allowed)
            available = len(rows)
            options["params"] = faiss.SearchParameters(  # type: ignore[call-arg]  # SWIG takes attributes as keywords
                sel=faiss.IDSelectorBatch(rows)
            )
        found: list[Rows] = []
        asked = min(top_k + 8, available)
        scores, hits = self._index.search(queries, asked, **options)
        for query, (its_scores, its_rows) in enumerate(zip(scores, hits, strict=True)):
            wanted = asked
            # faiss cuts ties off where it likes: ask for more until the last one is no tie.
            bar = its_scores[top_k - 1] - rounding(queries.shape[1])
            while wanted < available and its_scores[-1] >= bar:
                wanted = min(wanted * 4, available)
                more = self._index.search(queries[query : query + 1], wanted, **options)
                its_scores, its_rows = more[0][0], more[1][0]
            found.append(its_rows[its_scores >= bar])
        counts = [len(its_rows) for its_rows in found]
        return np.repeat(np.arange(len(queries)), counts), np.concatenate(found)

    def _release(self) -> None:
        # Runs once, while faiss is intact: at close, when this is garbage, at exit at the latest.
        with self._lock:
            index = self._index
            super()._release()
            # What leads to the index from elsewhere keeps no vectors: it is emptied in place.
            release(index)
