"""Vectors in a faiss index, which is changed in place, behind what anybody looks at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.searching.vector_store import Pairs, SavedVectors, VectorStore
from rag_demo.vectors import Rows, Vectors, rounding

__all__ = ["FaissVectors"]

_MORE = 8  # than were asked for: whether the last one is a tie is known then
_FEW_OTHERS = 64  # are asked for as well, and left out: faiss is faster without a selector


@dataclass(frozen=True)
class FaissVectors(VectorStore):
    """The first ``count`` vectors of an ``IndexFlatIP``; see `VectorStore`.

    Attributes:
        index: None while there are none. It may have vectors behind the first ones, of a
            change that was interrupted; the next change takes them away.
        count: See above.
    """

    index: Any = None
    count: int = 0

    def __len__(self) -> int:
        return self.count

    @property
    def dimension(self) -> int:
        """See `VectorStore`."""
        return 0 if self.index is None else int(self.index.d)

    def appended(self, vectors: Vectors) -> FaissVectors:
        """See `VectorStore`."""
        import faiss

        index = self.index
        if index is None:
            index = faiss.IndexFlatIP(vectors.shape[1])
        self._trim()
        index.add(np.ascontiguousarray(vectors))
        return FaissVectors(index, self.count + len(vectors))

    def kept(self, rows: Rows) -> FaissVectors:
        """See `VectorStore`."""
        empty = self.emptied()
        return empty.appended(self.vectors(rows)) if len(rows) else empty

    def opened(self, saved: SavedVectors) -> FaissVectors:
        """See `VectorStore`."""
        saved.check_all()
        empty = self.emptied()
        return empty.appended(saved.vectors) if len(saved.vectors) else empty

    def emptied(self) -> FaissVectors:
        """See `VectorStore`."""
        return FaissVectors()

    def vectors(self, rows: Rows | None = None) -> Vectors:
        """See `VectorStore`."""
        if self.index is None:
            return np.empty((0, 0), np.float32)
        vectors: Vectors
        if rows is None:
            vectors = self.index.reconstruct_n(0, self.count)
        else:
            vectors = self.index.reconstruct_batch(rows)
        return vectors

    def storage(self) -> tuple[str, str, int]:
        """See `VectorStore`."""
        return "cpu", "float32", 4 * self.count * self.dimension

    def candidates(
        self, queries: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> Pairs:
        """See `VectorStore`."""
        self._trim()
        others = 0 if allowed is None else int(self.count - allowed.sum())
        options, available = {}, self.count
        if others > _FEW_OTHERS:
            options, available = {"params": _selecting(allowed)}, self.count - others
            allowed, others = None, 0
        found: list[Rows] = []
        asked = min(top_k + _MORE + others, available)
        scores, hits = self.index.search(queries, asked, **options)
        for query, (its_scores, its_rows) in enumerate(zip(scores, hits, strict=True)):
            wanted = asked
            while True:
                good = slice(None) if allowed is None else allowed[its_rows]
                bar = its_scores[good][top_k - 1] - rounding(queries.shape[1])
                # faiss cuts ties off where it likes: ask for more until the last one is no tie.
                if wanted == available or its_scores[-1] < bar:
                    break
                wanted = min(wanted * 4, available)
                more = self.index.search(queries[query : query + 1], wanted, **options)
                its_scores, its_rows = more[0][0], more[1][0]
            found.append(its_rows[good][its_scores[good] >= bar])
        counts = [len(its_rows) for its_rows in found]
        return Pairs(np.repeat(np.arange(len(queries)), counts), np.concatenate(found))

    def _trim(self) -> None:
        """Take away what an interrupted change has left behind the vectors."""
        import faiss

        if self.index is not None and self.index.ntotal > self.count:
            self.index.remove_ids(faiss.IDSelectorRange(self.count, self.index.ntotal))


def _selecting(allowed: npt.NDArray[np.bool_] | None) -> Any:
    import faiss

    assert allowed is not None
    # SWIG takes attributes as keywords, and faiss an array with its length.
    selector: Any = faiss.IDSelectorBitmap
    bits = np.packbits(allowed, bitorder="little")
    return faiss.SearchParameters(sel=selector(bits))  # type: ignore[call-arg]  # see above
