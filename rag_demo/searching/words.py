"""Search by words: BM25 over the same documents, added to as they are.

What is kept is how often each word stands in each document, and how long documents are. What
depends on all documents, how rare a word is and how long they are on average, is computed by a
search: so scores are those of an index made anew, whatever was added and deleted before. That
is why this is not done by bm25s, which keeps the scores, and whose scores these are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document, Documents
from rag_demo.errors import RagDemoError
from rag_demo.searching.postings import Postings
from rag_demo.searching.tokens import STOP_WORDS, words_of

__all__ = ["Words"]

Alive = npt.NDArray[np.bool_] | None
Stem = Callable[[str], str]

_K1, _B = 1.5, 0.75
_DOCUMENTS_AT_ONCE = 1 << 12
# Another way to cut or stem gets another name, and what was kept under this one is made anew.
_PREFIX = "words2."
_NAMES = ("vocabulary", "terms", "starts", "packed", "places", "counts", "lengths")


class Words:
    """BM25 (k1 = 1.5, b = 0.75) over English words, stemmed, and the characters of CJK.

    It learns of documents that were added when it is asked, in pieces whose sizes double: the
    work for each document is small, and so is the number of pieces. An interruption at any
    moment leaves it right. Not safe across threads by itself.

    Args:
        kept: The arrays of `derived`, of the documents that are in the file.
    """

    def __init__(self, kept: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        self._kept = kept
        self._vocabulary = _Vocabulary()
        self._pieces: tuple[Postings, ...] = ()

    def search(
        self, query: str, documents: Documents, alive: Alive
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Score all documents that are alive and have a word of the query.

        Returns:
            Their numbers, in order, and their scores.

        Raises:
            RagDemoError: PyStemmer is not installed.
        """
        self.catch_up(documents)
        asked = Counter(
            term
            for words in words_of(query, is_query=True)
            for term in map(self._vocabulary.find, words)
            if term is not None
        )
        count = len(documents) if alive is None else int(np.count_nonzero(alive))
        total = sum(piece.total_length(alive) for piece in self._pieces)
        scores = np.zeros(len(documents))
        for term, times in asked.items():
            found = [piece.find(term, alive) for piece in self._pieces]
            matches = sum(len(numbers) for numbers, *_ in found)
            rarity = times * math.log(1 + (count - matches + 0.5) / (matches + 0.5))
            for numbers, frequency, length in found:
                norm = _K1 * (1 - _B + _B * length / (total / count)) if len(numbers) else 0.0
                scores[numbers] += rarity * (frequency / (frequency + norm))
        numbers = np.flatnonzero(scores)
        return numbers, scores[numbers]

    def catch_up(self, documents: Documents) -> None:
        """Learn of documents that were added."""
        self._restore()
        known = self._pieces[-1].stop if self._pieces else 0
        if known == len(documents):
            return
        new = []
        for start in range(known, len(documents), _DOCUMENTS_AT_ONCE):
            stop = min(start + _DOCUMENTS_AT_ONCE, len(documents))
            new.append(self._read(documents[n] for n in range(start, stop)).moved(start))
        pieces = (*self._pieces, Postings.join(new))
        while len(pieces) > 1 and len(pieces[-2]) <= 2 * len(pieces[-1]):
            pieces = (*pieces[:-2], Postings.join(pieces[-2:]))
        self._pieces = pieces

    def kept(self, numbers: npt.NDArray[np.int64]) -> Words:
        """Return those of a table that has only these documents, whose numbers are in order."""
        smaller = Words()
        self._restore()
        if not self._pieces:
            return smaller
        smaller._vocabulary = self._vocabulary
        known = numbers[: np.searchsorted(numbers, self._pieces[-1].stop)]
        smaller._pieces = (Postings.join(self._pieces).kept(known),)
        return smaller

    def derived(self, documents: Documents) -> dict[str, npt.NDArray[Any]]:
        """Return what makes it again, as arrays."""
        self.catch_up(documents)
        joined = Postings.join(self._pieces)
        stems = "\n".join(self._vocabulary.terms).encode("utf-8", "surrogatepass")
        arrays = (np.frombuffer(stems, np.uint8), *joined.arrays)
        return {_PREFIX + name: array for name, array in zip(_NAMES, arrays, strict=True)}

    def _restore(self) -> None:
        if self._kept is not None:
            self._vocabulary, self._pieces = _restored(self._kept)
            self._kept = None

    def _read(self, documents: Iterable[Document]) -> Postings:
        frequencies: list[npt.NDArray[np.int64]] = []
        terms: list[npt.NDArray[np.int64]] = []
        lengths: list[int] = []
        for document in documents:
            pairs: dict[int, int] = {}
            for words in words_of(document.text):
                for word, times in Counter(words).items():
                    term = self._vocabulary[word]
                    if term >= 0:
                        pairs[term] = pairs.get(term, 0) + times
            terms.append(np.fromiter(pairs.keys(), np.int64, len(pairs)))
            frequencies.append(np.fromiter(pairs.values(), np.int64, len(pairs)))
            lengths.append(sum(pairs.values()))
        return Postings.of(terms, frequencies, lengths)


class _Vocabulary(dict[str, int]):
    """The number of each word's stem; -1 for stop words. It only grows."""

    def __init__(self, terms: Iterable[str] = ()) -> None:
        super().__init__()
        self._stemmer: Stem | None = None  # Who never asks for words needs none.
        self.terms = {term: number for number, term in enumerate(terms)}

    def __missing__(self, word: str) -> int:
        if word in STOP_WORDS:
            number = -1
        else:
            number = self.terms.setdefault(self._stem(word), len(self.terms))
        self[word] = number
        return number

    def find(self, word: str) -> int | None:
        """Return the number of a word that is known already."""
        return None if word in STOP_WORDS else self.terms.get(self._stem(word))

    def _stem(self, word: str) -> str:
        if self._stemmer is None:
            try:
                import Stemmer
            except ImportError as error:
                raise RagDemoError(
                    f"the search for words needs PyStemmer ({error}); "
                    "install it with: pip install '.[rag]', in a clone of torch-cleanup"
                ) from None
            self._stemmer = Stemmer.Stemmer("english").stemWord
        return self._stemmer(word)


def _restored(kept: Mapping[str, npt.NDArray[Any]]) -> tuple[_Vocabulary, tuple[Postings, ...]]:
    arrays = [kept.get(_PREFIX + name) for name in _NAMES]
    if any(array is None for array in arrays):
        return _Vocabulary(), ()
    stems, *others = arrays
    terms = bytes(stems).decode("utf-8", "surrogatepass")  # type: ignore[arg-type]  # none is None
    vocabulary = _Vocabulary(terms.split("\n") if terms else ())
    return vocabulary, (Postings(0, *others),)  # type: ignore[arg-type]  # as above
