"""What a retriever holds: documents, their vectors, and which of them still count. A snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document
from rag_demo.documents.growing import Growing
from rag_demo.exact_search.exact_scores import Pairs
from rag_demo.store.document_table import DocumentTable
from rag_demo.store.facts import GONE
from rag_demo.store.filters import Where
from rag_demo.store.reader import SavedIndex
from rag_demo.store.words import Words
from rag_demo.vectors import Rows, Vectors

__all__ = ["Contents", "VectorRows"]

Mask = npt.NDArray[np.bool_]

_MOST_GONE = 4  # One row in so many may be of a document that is gone.


class VectorRows(Protocol):
    """Rows of vectors of length 1, in order: a snapshot that never changes.

    Two snapshots share what they can, so only the newer of two may be extended.
    """

    @property
    def dimension(self) -> int:
        """Length of the vectors; 0 without vectors."""

    def __len__(self) -> int:
        """How many rows there are."""

    def extended(self, vectors: Vectors) -> VectorRows:
        """Return a snapshot with more vectors behind these: shape (n, d)."""

    def opened(self, saved: SavedIndex) -> VectorRows:
        """Return a snapshot with the vectors of a saved index in place of these."""

    def emptied(self) -> VectorRows:
        """Return a snapshot without vectors."""

    def take(self, rows: Rows) -> Vectors:
        """Return the vectors of rows, a copy: shape (n, d), float32."""

    def candidates(self, queries: Vectors, top_k: int, allowed: Mask | None) -> Pairs:
        """Find the ``top_k`` best rows of each query, and all that might tie with them.

        Args:
            queries: Shape (b, d), each of length 1.
            top_k: At most as many as are allowed.
            allowed: Shape (rows,): look only at these; None for all.
        """

    @property
    def stays_in_file(self) -> bool:
        """Whether the vectors stay in a file because they are larger than the memory budget."""

    def storage(self) -> tuple[str, str, int]:
        """Return the device, the dtype that is searched in, and the bytes of the vectors."""


@dataclass(frozen=True)
class Contents:
    """Documents, their rows of vectors, and which of them count.

    Never changes: `added` and `without` return another one, or raise. A document has a number,
    which is never used again; a document that is replaced or deleted only stops counting, and
    when a quarter of all rows is of such ones, the others are put together.

    Attributes:
        vectors: One row for the whole of each document and for each of its passages.
        owners: The number of the document that each row belongs to: `Growing`, int64.
        passages: Start and stop of the passage that each row stands for, 0 and 0 for the whole
            document: `Growing`, shape (rows, 2).
        alive: Whether the document of a number counts: `Growing`, bool.
        count: How many documents count.
        next_name: The first number that was not tried as a name yet.
        saved: The index that the first documents are read from; None for none.
        first_recent: The number from which on documents are in ``recent``.
        recent: Documents in memory.
        words: The words of documents, which learns of new ones when somebody asks.
        origin: The same object in all that were made of each other without putting together.
    """

    vectors: VectorRows
    owners: Growing = field(default_factory=lambda: Growing(np.empty(0, np.int64)))
    passages: Growing = field(default_factory=lambda: Growing(np.empty((0, 2), np.int32)))
    alive: Growing = field(default_factory=lambda: Growing(np.empty(0, bool)))
    count: int = 0
    next_name: int = 0
    saved: SavedIndex | None = None
    first_recent: int = 0
    recent: DocumentTable = field(default_factory=DocumentTable.in_memory)
    words: Words = field(default_factory=Words)
    origin: object = field(default_factory=object)

    @classmethod
    def opened(cls, empty: VectorRows, saved: SavedIndex) -> Contents:
        """Make one of a saved index; its files are read when they are needed."""
        end = saved.facts.next_number
        alive = np.zeros(end, bool)
        alive[saved.owners[saved.owners != GONE]] = True
        owners, passages = Growing(saved.owners), Growing(saved.passages)
        words = Words(saved.words)
        return cls(empty.opened(saved), owners, passages, Growing(alive), saved.facts.count, end,
                   saved=saved, first_recent=end, words=words)  # fmt: skip

    def emptied(self) -> Contents:
        """Return one without documents."""
        return Contents(self.vectors.emptied(), next_name=self.next_name)

    @property
    def next_number(self) -> int:
        """The number of the next document."""
        return len(self.alive)

    def choose_names(self, count: int) -> tuple[list[str], Contents]:
        """Find so many names that no document has."""
        names: list[str] = []
        number = self.next_name
        while len(names) < count:
            tried = [str(n) for n in range(number, number + count - len(names))]
            number += len(tried)
            taken = self.find(tried)
            names += [name for name in tried if name not in taken]
        return names, replace(self, next_name=number)

    def added(
        self, documents: Sequence[Document], owners: Rows, passages: Any, vectors: Vectors
    ) -> Contents:
        """Put documents behind these; one whose id is there replaces the old one.

        Args:
            documents: Their ids differ.
            owners: Which of the documents each vector belongs to: shape (n,).
            passages: See the class: shape (n, 2).
            vectors: Shape (n, d).

        Raises:
            ValueError: The vectors have another dimension than those that are here.
        """
        old = list(self.find([document.id for document in documents]).values())
        here = self if self.count > len(old) else self.emptied()
        dimension = here.vectors.dimension
        if dimension and vectors.shape[1] != dimension:
            raise ValueError(
                f"the model's vectors have {vectors.shape[1]} dimensions, "
                f"those already here {dimension}"
            )
        if here is self:
            here = self._without(old)
        first = here.next_number
        here.recent.replace_from(first, documents)
        return replace(
            here,
            vectors=here.vectors.extended(vectors),
            owners=here.owners.append(owners + first),
            passages=here.passages.append(passages),
            alive=here.alive.append(np.ones(len(documents), bool)),
            count=here.count + len(documents),
        )._tidied()

    def without(self, ids: Sequence[str]) -> Contents:
        """Remove documents; ids that are not there are passed over."""
        return self._without(list(self.find(ids).values()))._tidied()

    def _without(self, numbers: Sequence[int]) -> Contents:
        if not numbers:
            return self
        alive = self.alive.rows.copy()
        alive[numbers] = False
        return replace(self, alive=Growing(alive), count=self.count - len(numbers))

    def _tidied(self) -> Contents:
        """Put together what counts, if much of the rest does not."""
        if not self.count:
            return self.emptied()
        if self.vectors.stays_in_file or self.count * 64 > len(self.alive) * 63:
            return self
        gone = len(self.owners) - int(np.count_nonzero(self.live_rows))
        return self.compacted() if gone * _MOST_GONE > len(self.owners) else self

    def compacted(self) -> Contents:
        """Return the same with the vectors of documents that count only, in memory."""
        rows = np.flatnonzero(self.live_rows)
        recent = self.recent
        in_recent = self.alive.rows[self.first_recent :]
        if len(in_recent) > 2 * np.count_nonzero(in_recent):
            recent = DocumentTable.in_memory()
            recent.insert(
                pair for pair in self.numbered(self.first_recent) if pair[0] >= self.first_recent
            )
        return replace(
            self,
            vectors=self.vectors.emptied().extended(self.vectors.take(rows)),
            owners=Growing(self.owners.rows[rows]),
            passages=Growing(self.passages.rows[rows]),
            recent=recent,
            words=self.words if len(self.alive) < 4 * self.count else Words(),
            origin=object(),
        )

    @property
    def live_rows(self) -> Mask:
        """Whether each row belongs to a document that counts: shape (rows,)."""
        owners = self.owners.rows
        live: Mask = self.alive.rows[owners]
        if self.saved is not None:  # GONE is -1, which numpy takes for the last document.
            live &= owners != GONE
        return live

    def find(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the numbers of the documents that have these ids and count."""
        found: dict[str, int] = {}
        if self.count:
            for table in self._tables():
                for name, number in table.find(ids):
                    if number < self.next_number and self.alive.rows[number]:
                        found[name] = number
        return found

    def documents(self, numbers: Sequence[int]) -> list[Document]:
        """Return documents by their numbers."""
        return self._by_table(numbers, DocumentTable.get)

    def ids(self, numbers: Sequence[int]) -> list[str]:
        """Return the ids of documents by their numbers."""
        return self._by_table(numbers, DocumentTable.ids)

    def numbered(self, start: int = 0) -> Iterator[tuple[int, Document]]:
        """Yield the documents that count with their numbers, from a number on."""
        for table in self._tables():
            # Of later ones, which a save has put into the saved index too, those in memory count.
            stop = self.next_number if table is self.recent else self.first_recent
            for number, document in table.stream(start):
                if number >= stop:
                    break
                if self.alive.rows[number]:
                    yield number, document

    def matching(self, where: Where | None) -> Mask | None:
        """Say which documents count and match, by their numbers; None if all of them do."""
        alive: Mask = self.alive.rows
        if where is None:
            return None if self.count == len(alive) else alive
        end = self.next_number
        parts = [self.recent.matching(where, self.first_recent, end)]
        if self.saved is not None:
            parts.insert(0, self.saved.documents.matching(where, 0, self.first_recent))
        return np.asarray(np.concatenate(parts) & alive, bool)

    def rows_of(self, allowed: Mask | None) -> Mask | None:
        """Turn what `matching` returned into rows."""
        if allowed is None:
            return None
        owners = self.owners.rows
        return np.asarray(allowed[owners] & (owners != GONE), bool)

    def search_words(
        self, query: str, allowed: Mask | None, top_k: int
    ) -> tuple[Rows, npt.NDArray[np.float64]]:
        """Find documents by their words; see `rag_demo.store.words.Words.search`."""
        self.catch_up_words()
        return self.words.search(query, self.alive.rows if allowed is None else allowed, top_k)

    def catch_up_words(self) -> None:
        """Let ``words`` learn of all documents.

        Raises:
            RagDemoError: tantivy or PyStemmer is not installed, or the disk is full.
        """
        self.words.catch_up(
            self.next_number,
            lambda start: ((number, each.text) for number, each in self.numbered(start)),
        )

    def released(self) -> Contents:
        """Close files and databases, which nobody may be using, and return one without anything."""
        self.words.close()
        self.recent.close()
        if self.saved is not None:
            self.saved.close()
        empty = Growing(np.empty(0, np.int64))
        return replace(
            self, vectors=self.vectors.emptied(), owners=empty, passages=empty, alive=empty,
            count=0, saved=None,
        )  # fmt: skip

    def _tables(self) -> list[DocumentTable]:
        return [self.recent] if self.saved is None else [self.saved.documents, self.recent]

    def _by_table(
        self, numbers: Sequence[int], read: Callable[[DocumentTable, list[int]], list[Any]]
    ) -> list[Any]:
        if self.saved is None:
            return read(self.recent, list(numbers))
        recent = iter(read(self.recent, [n for n in numbers if n >= self.first_recent]))
        saved = iter(read(self.saved.documents, [n for n in numbers if n < self.first_recent]))
        return [next(recent if n >= self.first_recent else saved) for n in numbers]
