"""Which document each row of vectors belongs to, and which span of its text it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.growing import Growing
from rag_demo.documents.passages import passages_of
from rag_demo.vectors import Rows

__all__ = ["DocumentProgress", "DocumentRows", "Span", "texts_to_embed"]

Span = tuple[int, int]  # start and stop in the document's text, in characters


class DocumentRows:
    """The rows of documents: one for the whole of each, then one for each of its passages.

    Immutable. Where no document has passages, a row is a document and nothing is stored.
    `extended` shares the memory of this one, and of the two only the newer may be extended again.

    Args:
        documents: How many there are.
        counts: Rows of each document, at least 1: shape (documents,). None where all have 1.
        spans: Start and stop of what each row stands for: shape (rows, 2); 0 and 0 for a whole.

    Raises:
        ValueError: They do not fit together.
    """

    def __init__(
        self,
        documents: int,
        counts: npt.NDArray[np.int64] | None = None,
        spans: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self._documents = documents
        self.counts, self.spans = counts, spans
        self._first: Rows | None = None
        self._growing: tuple[Growing, Growing, Growing] | None = None
        if counts is not None and spans is not None:
            if len(counts) != documents or (counts < 1).any() or (counts > len(spans)).any():
                raise ValueError("a document without rows")
            # The sums of counts that are not too large cannot overflow: see above.
            self._first = np.concatenate([[0], np.cumsum(counts)])
            if self._first[-1] != len(spans) or spans.shape[1:] != (2,) or (spans < 0).any():
                raise ValueError("spans that do not fit the rows of the documents")

    @classmethod
    def of(cls, spans: Sequence[Sequence[Span]]) -> DocumentRows:
        """Make them of the passages of each document."""
        if not any(spans):
            return cls(len(spans))
        rows = [span for its in spans for span in ((0, 0), *its)]
        counts = np.asarray([1 + len(its) for its in spans], np.int64)
        return cls(len(spans), counts, np.asarray(rows, np.int64).reshape(-1, 2))

    def __len__(self) -> int:
        """How many rows there are."""
        return self._documents if self.spans is None else len(self.spans)

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return self._documents

    @property
    def are_whole(self) -> bool:
        """Whether each row is a document."""
        return self._first is None

    def owners(self, rows: Rows) -> Rows:
        """Return the document of each row."""
        if self._first is None:
            return rows
        owners: Rows = np.searchsorted(self._first, rows, side="right") - 1
        return owners

    def span(self, row: int) -> Span | None:
        """Return the span of the text that a row stands for; None for all of it."""
        if self.spans is None:
            return None
        start, stop = self.spans[row].tolist()
        return (start, stop) if stop else None

    def rows_of(self, documents: Rows) -> Rows:
        """Return the rows of documents, in the order of these."""
        if self._first is None or self.counts is None:
            return documents
        counts = self.counts[documents]
        before = np.cumsum(counts) - counts
        rows: Rows = np.arange(counts.sum()) + np.repeat(self._first[documents] - before, counts)
        return rows

    def spread(self, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Choose the rows of chosen documents: shape (documents,) to (rows,)."""
        return chosen if self.counts is None else np.repeat(chosen, self.counts)

    def keep(self, documents: Rows) -> DocumentRows:
        """Return those of some documents, in the order of these."""
        if self.counts is None or self.spans is None:
            return DocumentRows(len(documents))
        counts = self.counts[documents]
        if (counts == 1).all():
            return DocumentRows(len(documents))
        return DocumentRows(len(documents), counts, self.spans[self.rows_of(documents)])

    def extended(self, other: DocumentRows) -> DocumentRows:
        """Return these with the documents of another behind them."""
        documents = self.documents + other.documents
        if self.are_whole and other.are_whole:
            return DocumentRows(documents)
        counts, spans, first = self._growing or (
            Growing(_or_ones(self.counts, self.documents)),
            Growing(_or_wholes(self.spans, len(self))),
            Growing(np.arange(self.documents + 1) if self._first is None else self._first),
        )
        new = _or_ones(other.counts, other.documents)
        bigger = DocumentRows(documents)
        bigger._growing = (
            counts.append(new),
            spans.append(_or_wholes(other.spans, len(other))),
            first.append(len(self) + np.cumsum(new)),
        )
        bigger.counts, bigger.spans, bigger._first = (each.rows for each in bigger._growing)
        return bigger

    @staticmethod
    def join(several: Sequence[DocumentRows]) -> DocumentRows:
        """Put the documents of some behind those of others."""
        joined = DocumentRows(0)
        for each in several:
            joined = joined.extended(each)
        return joined


def _or_ones(counts: npt.NDArray[np.int64] | None, documents: int) -> npt.NDArray[np.int64]:
    return np.ones(documents, np.int64) if counts is None else counts


def _or_wholes(spans: npt.NDArray[np.int64] | None, rows: int) -> npt.NDArray[np.int64]:
    return np.zeros((rows, 2), np.int64) if spans is None else spans


def texts_to_embed(
    documents: Iterable[tuple[str, Mapping[str, Any]]],
) -> tuple[list[str], DocumentRows]:
    """Say what is embedded for documents: each of them, and the passages of long ones.

    Args:
        documents: Texts and metadata, whose "title" is put before passages.
    """
    to_embed: list[str] = []
    spans = []
    for text, metadata in documents:
        passages = passages_of(text, metadata.get("title"))
        to_embed += [text, *(passage.text for passage in passages)]
        spans.append([(passage.start, passage.stop) for passage in passages])
    return to_embed, DocumentRows.of(spans)


class DocumentProgress:
    """Tells of documents while it is told of what is embedded for them, of which there is more."""

    def __init__(self, documents: int, texts: int, on_progress: Callable[[int], object]) -> None:
        self._documents, self._texts, self._on_progress = documents, texts, on_progress
        self._done = self._told = 0

    def __call__(self, count: int) -> None:
        """Say that so many more texts are embedded."""
        self._done += count
        told = self._documents * self._done // self._texts
        self._on_progress(told - self._told)
        self._told = told
