"""FaissRetriever: the same interface on faiss's exact index.

The life of the index: `FaissVectors.extended` makes it (``faiss.IndexFlatIP``) and adds to it,
`candidates` searches it, and `FaissRetriever._release` gives its memory back in place.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rag_demo.exact_search.exact_scores import Pairs
from rag_demo.retriever import BasicEmbedder, Retriever
from rag_demo.store.reader import SavedIndex
from rag_demo.vectors import Rows, Vectors, rounding
from torch_utils import release
from torch_utils.resource import closes_on_error

__all__ = ["FaissRetriever"]

_MORE = 8  # than were asked for: whether the last one is a tie is known then
_FEW_OTHERS = 64  # are asked for as well, and left out: faiss is faster without a selector


class FaissRetriever(Retriever):
    """Exact cosine top-k with ``faiss.IndexFlatIP``, on the CPU. See `Retriever`.

    Searches take turns with each other and with `add`: faiss adds to the index in place, and
    searches with all threads that there are.

    Args:
        embedding_model: What turns texts into vectors; it is not closed with this.
    """

    @closes_on_error
    def __init__(self, embedding_model: BasicEmbedder) -> None:
        super().__init__(embedding_model, FaissVectors())  # Opens an index with the first `add`.

    def _release(self) -> None:
        # Runs once, while faiss is intact: at close, when this is garbage, at exit at the latest.
        if not hasattr(self, "_contents"):
            return  # `__init__` has refused its arguments.
        index = cast(FaissVectors, self._take_out()).index
        # What leads to the index from elsewhere keeps no vectors: it is emptied in place.
        release(index)


@dataclass(frozen=True)
class FaissVectors:
    """The first ``count`` vectors of an ``IndexFlatIP``; see `VectorRows`.

    Attributes:
        index: None without vectors. It may have vectors behind the first ones, of a
            change that was interrupted, or of a later snapshot.
        count: See above.
        lock: Of the index.
    """

    index: Any = None
    count: int = 0
    lock: Any = field(default_factory=threading.RLock)

    def __len__(self) -> int:
        return self.count

    @property
    def dimension(self) -> int:
        """See `VectorRows`."""
        return 0 if self.index is None else int(self.index.d)

    def extended(self, vectors: Vectors) -> FaissVectors:
        """See `VectorRows`."""
        import faiss

        index = self.index
        if index is None:
            index = faiss.IndexFlatIP(vectors.shape[1])
        with self.lock:
            if index.ntotal > self.count:
                index.remove_ids(faiss.IDSelectorRange(self.count, index.ntotal))
            index.add(np.ascontiguousarray(vectors))
        return FaissVectors(index, self.count + len(vectors), self.lock)

    def opened(self, saved: SavedIndex) -> FaissVectors:
        """See `VectorRows`."""
        saved.check_vectors()
        empty = self.emptied()
        return empty.extended(saved.vectors) if len(saved.vectors) else empty

    @property
    def stays_in_file(self) -> bool:
        """See `VectorRows`."""
        return False

    def emptied(self) -> FaissVectors:
        """See `VectorRows`."""
        return FaissVectors()

    def take(self, rows: Rows) -> Vectors:
        """See `VectorRows`."""
        with self.lock:
            vectors: Vectors = self.index.reconstruct_batch(rows)
        return vectors

    def storage(self) -> tuple[str, str, int]:
        """See `VectorRows`."""
        return "cpu", "float32", 4 * self.count * self.dimension

    def candidates(
        self, queries: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> Pairs:
        """See `VectorRows`."""
        with self.lock:
            return self._candidates(queries, top_k, allowed)

    def _candidates(
        self, queries: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> Pairs:
        has_more = self.index.ntotal > self.count
        if allowed is None and has_more:
            allowed = np.ones(self.count, bool)
        others = 0 if allowed is None else int(self.count - allowed.sum())
        options, available = {}, self.count
        if others > _FEW_OTHERS or has_more:
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
                # faiss cuts ties off where it likes: ask for more until the last one does not tie.
                if wanted == available or its_scores[-1] < bar:
                    break
                wanted = min(wanted * 4, available)
                more = self.index.search(queries[query : query + 1], wanted, **options)
                its_scores, its_rows = more[0][0], more[1][0]
            found.append(its_rows[good][its_scores[good] >= bar])
        counts = [len(its_rows) for its_rows in found]
        return Pairs(np.repeat(np.arange(len(queries)), counts), np.concatenate(found))


def _selecting(allowed: npt.NDArray[np.bool_] | None) -> Any:
    import faiss

    assert allowed is not None
    # SWIG takes attributes as keywords, and faiss an array with its length.
    selector: Any = faiss.IDSelectorBitmap
    bits = np.packbits(allowed, bitorder="little")
    return faiss.SearchParameters(sel=selector(bits))  # type: ignore[call-arg]  # see above
