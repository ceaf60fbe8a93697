"""The contents of a retriever: a snapshot of its documents and their vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document
from rag_demo.exact_search.exact_scores import Pairs
from rag_demo.store.document_table import DocumentTable
from rag_demo.store.filters import Where
from rag_demo.store.index_format import GONE
from rag_demo.store.reader import SavedIndex
from rag_demo.store.text_index import TextIndex
from rag_demo.vectors import GrowableRows, Mask, Rows, Vectors


class VectorRows(Protocol):
    """Rows of vectors of length 1: a snapshot that never changes.

    Snapshots share memory where they can, so extend the newest one only.
    """

    @property
    def dimension(self) -> int:
        """Length of the vectors; 0 without vectors."""

    def __len__(self) -> int:
        """How many rows there are."""

    def extended(self, vectors: Vectors) -> VectorRows:
        """Return a snapshot with more vectors at the end: shape (n, d)."""

    def with_saved_rows(self, saved: SavedIndex) -> VectorRows:
        """Return a snapshot with the vectors of a saved index instead of these."""

    def empty_copy(self) -> VectorRows:
        """Return a snapshot without vectors."""

    def take(self, rows: Rows) -> Vectors:
        """Return a copy of the vectors of rows: shape (n, d), float32."""

    def candidates(self, queries: Vectors, top_k: int, allowed: Mask | None) -> Pairs:
        """Find the ``top_k`` best rows of each query, and all that might tie with them.

        Args:
            queries: Shape (b, d), each of length 1.
            top_k: How many, at most as many as are allowed.
            allowed: Which rows to search: shape (rows,); None for all.
        """

    @property
    def stays_in_file(self) -> bool:
        """Whether the vectors stay in a file because they exceed the memory budget."""

    def storage(self) -> tuple[str, str, int]:
        """Return the device, the dtype that is searched, and the bytes of the vectors."""


@dataclass(frozen=True)
class Contents:
    """Documents, their rows of vectors, and which of them still exist.

    Contents never change: `with_documents` and `without_documents` return others, or raise. Each
    document has a number that is never used again. Replacing or deleting a document only marks its
    number. When a quarter of all rows belongs to such documents, the other rows are copied.

    Attributes:
        vectors: One row for each whole document and for each of its passages.
        owners: The number of each row's document: int64.
        passages: Start and stop of each row's passage; 0 and 0 for the whole: shape (rows, 2).
        alive: Whether the document of each number exists: bool.
        count: How many documents exist.
        next_name: The first integer that was not yet tried as an id.
        saved: The saved index with the first documents, or None.
        first_recent: Documents from this number on are in ``recent``.
        recent: Documents in memory.
        text_index: The full-text index. It learns of new documents when it is searched.
        origin: The same object in all contents that share their row numbers.
    """

    vectors: VectorRows
    owners: GrowableRows = field(default_factory=lambda: GrowableRows(np.empty(0, np.int64)))
    passages: GrowableRows = field(default_factory=lambda: GrowableRows(np.empty((0, 2), np.int32)))
    alive: GrowableRows = field(default_factory=lambda: GrowableRows(np.empty(0, bool)))
    count: int = 0
    next_name: int = 0
    saved: SavedIndex | None = None
    first_recent: int = 0
    recent: DocumentTable = field(default_factory=DocumentTable.in_memory)
    text_index: TextIndex = field(default_factory=TextIndex)
    origin: object = field(default_factory=object)

    @classmethod
    def with_saved_rows(cls, empty: VectorRows, saved: SavedIndex) -> Contents:
        """Open a saved index. Its files are read when they are needed."""
        end = saved.manifest.next_number
        alive = np.zeros(end, bool)
        alive[saved.owners[saved.owners != GONE]] = True
        owners, passages = GrowableRows(saved.owners), GrowableRows(saved.passages)
        text_index = TextIndex(saved.text_index)
        return cls(
            empty.with_saved_rows(saved),
            owners,
            passages,
            GrowableRows(alive),
            saved.manifest.count,
            end,
            saved=saved,
            first_recent=end,
            text_index=text_index,
        )

    def empty_copy(self) -> Contents:
        """Return contents without documents."""
        return Contents(self.vectors.empty_copy(), next_name=self.next_name)

    @property
    def next_number(self) -> int:
        """The number of the next document."""
        return len(self.alive)

    def choose_names(self, count: int) -> tuple[list[str], Contents]:
        """Choose ids that no document has."""
        names: list[str] = []
        number = self.next_name
        while len(names) < count:
            tried = [str(n) for n in range(number, number + count - len(names))]
            number += len(tried)
            taken = self.find(tried)
            names += [name for name in tried if name not in taken]
        return names, replace(self, next_name=number)

    def with_documents(
        self, documents: Sequence[Document], owners: Rows, passages: Any, vectors: Vectors
    ) -> Contents:
        """Add documents; a document replaces an older one with its id.

        Args:
            documents: Documents with different ids.
            owners: The place in ``documents`` of each vector's document: shape (n,).
            passages: Start and stop of each vector's passage: shape (n, 2).
            vectors: Shape (n, d).

        Raises:
            ValueError: The vectors have another dimension than the present ones.
        """
        old = list(self.find([document.id for document in documents]).values())
        here = self if self.count > len(old) else self.empty_copy()
        dimension = here.vectors.dimension
        if dimension and vectors.shape[1] != dimension:
            raise ValueError(
                f"the model's vectors have {vectors.shape[1]} dimensions, "
                f"but the retriever has {dimension}; use the model that made its vectors"
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

    def without_documents(self, ids: Sequence[str]) -> Contents:
        """Remove documents; unknown ids are ignored."""
        return self._without(list(self.find(ids).values()))._tidied()

    def _without(self, numbers: Sequence[int]) -> Contents:
        if not numbers:
            return self
        alive = self.alive.rows.copy()
        alive[numbers] = False
        return replace(self, alive=GrowableRows(alive), count=self.count - len(numbers))

    def _tidied(self) -> Contents:
        """Compact the rows if many belong to documents that are gone."""
        if not self.count:
            return self.empty_copy()
        if self.vectors.stays_in_file or self.count * 64 > len(self.alive) * 63:
            return self
        gone = len(self.owners) - int(np.count_nonzero(self.live_rows))
        return self.compact_copy() if 4 * gone > len(self.owners) else self

    def compact_copy(self) -> Contents:
        """Return the same with the rows of existing documents only, in memory."""
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
            vectors=self.vectors.empty_copy().extended(self.vectors.take(rows)),
            owners=GrowableRows(self.owners.rows[rows]),
            passages=GrowableRows(self.passages.rows[rows]),
            recent=recent,
            text_index=self.text_index if len(self.alive) < 4 * self.count else TextIndex(),
            origin=object(),
        )

    @property
    def live_rows(self) -> Mask:
        """Whether each row belongs to a document that exists: shape (rows,)."""
        owners = self.owners.rows
        live: Mask = self.alive.rows[owners]
        if self.saved is not None:  # GONE is -1, which indexes the last document.
            live &= owners != GONE
        return live

    def find(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the numbers of the existing documents with these ids."""
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
        """Yield the existing documents with their numbers, from a number on."""
        for table in self._tables():
            # A save also puts later documents into the saved index; those in memory are used.
            stop = self.next_number if table is self.recent else self.first_recent
            for number, document in table.stream(start):
                if number >= stop:
                    break
                if self.alive.rows[number]:
                    yield number, document

    def matching(self, where: Where | None) -> Mask | None:
        """Tell which document numbers exist and match a filter; None if all do."""
        alive: Mask = self.alive.rows
        if where is None:
            return None if self.count == len(alive) else alive
        end = self.next_number
        parts = [self.recent.matching(where, self.first_recent, end)]
        if self.saved is not None:
            parts.insert(0, self.saved.documents.matching(where, 0, self.first_recent))
        return np.asarray(np.concatenate(parts) & alive, bool)

    def rows_of(self, allowed: Mask | None) -> Mask | None:
        """Turn a mask of documents into a mask of rows."""
        if allowed is None:
            return None
        owners = self.owners.rows
        return np.asarray(allowed[owners] & (owners != GONE), bool)

    def search_text(
        self, query: str, allowed: Mask | None, top_k: int
    ) -> tuple[Rows, npt.NDArray[np.float64]]:
        """Search the full text; see `rag_demo.store.text_index.TextIndex.search`."""
        self.catch_up_text()
        return self.text_index.search(query, self.alive.rows if allowed is None else allowed, top_k)

    def catch_up_text(self) -> None:
        """Add the missing documents to the full-text index.

        Raises:
            RagDemoError: tantivy or PyStemmer is not installed, or the disk is full.
        """
        self.text_index.catch_up(
            self.next_number,
            lambda start: ((number, each.text) for number, each in self.numbered(start)),
        )

    def close(self) -> Contents:
        """Close all files and databases, and return empty contents. Nothing may be using these."""
        self.text_index.close()
        self.recent.close()
        if self.saved is not None:
            self.saved.close()
        empty = GrowableRows(np.empty(0, np.int64))
        return replace(
            self, vectors=self.vectors.empty_copy(), owners=empty, passages=empty, alive=empty,
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
