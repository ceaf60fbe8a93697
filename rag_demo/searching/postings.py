"""Postings: for each word the documents that it stands in, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Postings"]

Array = npt.NDArray[Any]

_BITS = 6  # of a count; the others are of a document's number
_LARGEST = (1 << _BITS) - 1
_MOST_DOCUMENTS = 1 << (32 - _BITS)


@dataclass(frozen=True)
class Postings:
    """Those of consecutive documents; four bytes for each pair of a word and a document.

    Attributes:
        first: The number of the first document.
        terms: The numbers of the words, in order: shape (words,), uint32.
        starts: Where the pairs of each word begin, and where the last ones end, uint32.
        packed: A document, counted from the first one, and how often: shape (pairs,), uint32.
        places, counts: Where that is more often than fits, and how often; uint32.
        lengths: How many words each document has: shape (documents,), uint32.
    """

    first: int
    terms: Array
    starts: Array
    packed: Array
    places: Array
    counts: Array
    lengths: Array

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def stop(self) -> int:
        """The number of the first document behind these."""
        return self.first + len(self.lengths)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All but the number of the first document."""
        return self.terms, self.starts, self.packed, self.places, self.counts, self.lengths

    @classmethod
    def of(
        cls, terms: Sequence[Array], counts: Sequence[Array], lengths: Sequence[int]
    ) -> Postings:
        """Make them of the words of each document, and how often each of them stands there."""
        documents = np.repeat(np.arange(len(terms)), [len(each) for each in terms])
        words = np.concatenate([*terms, np.empty(0, np.int64)])
        times = np.concatenate([*counts, np.empty(0, np.int64)])
        order = np.argsort(words, kind="stable")
        words, starts = np.unique(words[order], return_index=True)
        documents, times = documents[order], times[order]
        places = np.flatnonzero(times > _LARGEST)
        return cls(
            0,
            words.astype(np.uint32),
            np.append(starts, len(times)).astype(np.uint32),
            documents.astype(np.uint32) << _BITS | np.minimum(times, _LARGEST).astype(np.uint32),
            places.astype(np.uint32),
            times[places].astype(np.uint32),
            np.asarray(lengths, np.uint32),
        )

    def moved(self, first: int) -> Postings:
        """Return these for documents of other numbers."""
        return replace(self, first=first)

    @staticmethod
    def join(several: Sequence[Postings]) -> Postings:
        """Put those of one behind those of another, which follows it; nothing is sorted again."""
        if len(several) == 1:
            return several[0]
        if sum(map(len, several)) > _MOST_DOCUMENTS:
            raise ValueError(f"more than {_MOST_DOCUMENTS} documents cannot be searched by words")
        empty = np.empty(0, np.uint32)
        first = several[0].first if several else 0
        terms = np.unique(np.concatenate([empty, *(piece.terms for piece in several)]))
        widths = np.zeros(len(terms), np.int64)
        for piece in several:
            widths[np.searchsorted(terms, piece.terms)] += piece._widths
        starts = np.concatenate([[0], np.cumsum(widths)])
        filled = starts[:-1].copy()
        packed = np.empty(starts[-1], np.uint32)
        places = []
        for piece in several:
            its = np.searchsorted(terms, piece.terms)
            moved = np.repeat(filled[its] - piece.starts[:-1], piece._widths)
            moved += np.arange(len(moved))
            packed[moved] = piece.packed + np.uint32((piece.first - first) << _BITS)
            places.append(moved[piece.places])
            filled[its] += piece._widths
        everywhere = np.concatenate([np.empty(0, np.int64), *places])
        order = np.argsort(everywhere)
        return Postings(
            first,
            terms,
            starts.astype(np.uint32),
            packed,
            everywhere[order].astype(np.uint32),
            np.concatenate([empty, *(piece.counts for piece in several)])[order],
            np.concatenate([empty, *(piece.lengths for piece in several)]),
        )

    def kept(self, numbers: npt.NDArray[np.int64]) -> Postings:
        """Return those of some of the documents, whose numbers are in order, counted anew."""
        new = np.full(len(self), -1, np.int64)
        new[numbers - self.first] = np.arange(len(numbers))
        documents = new[self.packed >> _BITS]
        good = documents >= 0
        before = np.concatenate([[0], np.cumsum(good)])
        starts = before[self.starts]
        used = np.flatnonzero(np.diff(starts))
        large = good[self.places]
        return Postings(
            0,
            self.terms[used],
            np.append(starts[used], before[-1]).astype(np.uint32),
            documents[good].astype(np.uint32) << _BITS | (self.packed[good] & _LARGEST),
            before[self.places[large]].astype(np.uint32),
            self.counts[large],
            self.lengths[numbers - self.first],
        )

    def find(self, term: int, alive: npt.NDArray[np.bool_] | None) -> tuple[Array, Array, Array]:
        """Return the documents with a word, how often it stands there, and their lengths."""
        place = int(np.searchsorted(self.terms, term))
        if place == len(self.terms) or self.terms[place] != term:
            empty = np.empty(0, np.int64)
            return empty, empty, empty
        start, stop = int(self.starts[place]), int(self.starts[place + 1])
        packed = self.packed[start:stop]
        documents, counts = (packed >> _BITS).astype(np.int64), (packed & _LARGEST).astype(float)
        large = slice(*np.searchsorted(self.places, (start, stop)))
        counts[self.places[large].astype(np.int64) - start] = self.counts[large]
        lengths = self.lengths[documents]
        if alive is not None:
            good = alive[self.first : self.stop][documents]
            documents, counts, lengths = documents[good], counts[good], lengths[good]
        return documents + self.first, counts, lengths

    def total_length(self, alive: npt.NDArray[np.bool_] | None) -> int:
        """Count the words of the documents that are alive."""
        lengths = self.lengths
        if alive is not None:
            lengths = lengths[alive[self.first : self.stop]]
        return int(lengths.sum(dtype=np.int64))

    @property
    def _widths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.starts.astype(np.int64)).astype(np.int64)
