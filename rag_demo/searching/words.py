"""Search by words: BM25 over the same documents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.errors import RagDemoError

__all__ = ["WordIndex"]


class WordIndex:
    """BM25 (k1 = 1.5, b = 0.75) over English words, stemmed, by the library bm25s.

    Args:
        texts: The documents, in the order of their numbers.

    Raises:
        RagDemoError: bm25s or PyStemmer is not installed.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        try:
            import bm25s
            import Stemmer
        except ImportError as error:
            raise RagDemoError(
                f"the search for words needs bm25s and PyStemmer ({error}); "
                'install them with: pip install "torch-cleanup[rag]"'
            ) from None
        self._bm25s, self._stemmer = bm25s, Stemmer.Stemmer("english")
        self._index = bm25s.BM25(k1=1.5, b=0.75)
        words = self._words(list(texts))
        self._is_empty = not any(words)
        if not self._is_empty:
            self._index.index(words, show_progress=False)

    def _words(self, texts: list[str]) -> list[list[str]]:
        words: list[list[str]] = self._bm25s.tokenize(
            texts, stopwords="en", stemmer=self._stemmer, return_ids=False, show_progress=False
        )
        return words

    def search(
        self, query: str, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Find the best documents, none without a common word.

        Returns:
            Their numbers and their scores, at most ``top_k``.
        """
        nothing = np.empty(0, np.int64), np.empty(0)
        if self._is_empty:
            return nothing
        (words,) = self._words([query])
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return nothing
        scores: Any = self._index.get_scores(known).astype(np.float64)
        if allowed is not None:
            scores[~allowed] = 0.0
        found = np.flatnonzero(scores > 0)
        # The order of documents decides between equal scores: the earlier comes first.
        best = found[np.argsort(-scores[found], kind="stable")[:top_k]]
        return best, scores[best]
