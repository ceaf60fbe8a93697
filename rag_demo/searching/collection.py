"""What a retriever holds: documents, their vectors, and who of them is still there. A snapshot."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document, Documents
from rag_demo.documents.ids import Ids
from rag_demo.documents.rows import DocumentRows
from rag_demo.errors import RagDemoError
from rag_demo.searching.columns import Columns
from rag_demo.searching.vector_store import SavedVectors, VectorStore
from rag_demo.searching.words import Words
from rag_demo.vectors import Rows, Vectors

if TYPE_CHECKING:
    from rag_demo.index import SavedIndex

__all__ = ["Collection"]

log = logging.getLogger("rag_demo")

Mask = npt.NDArray[np.bool_]

_MOST_GONE = 4  # One row in so many may be of a document that is gone.
_MOST_DERIVED = 0.3  # of the bytes of vectors and texts
_MOST_COLUMNS = 0.05
_OF_A_LINE, _OF_A_VALUE = 40, 16  # characters of JSON around an id and a text, and metadata


@dataclass(frozen=True)
class Collection:
    """Documents and their vectors.

    Never changes: `added` and `without` return another one, or raise. They take a time that
    does not depend on how many documents there are, for they share all that is the same: of two
    only the newer may be changed again. A deleted document is only marked; when a quarter is
    gone, the rest is put together. What is computed of documents, such as words and columns, is
    shared too, learns of new ones when somebody asks, and is right whenever that is interrupted.

    Attributes:
        vectors: One row for each document and each passage.
        documents: All, those that are gone too.
        rows: Which vectors are whose.
        ids: Which document has a name.
        words, columns: For the search by words and for filters.
        alive: Shape (documents,): which are not gone; None if none is.
        alive_rows: Shape (rows,): the same for their vectors.
        next_id: The first number that was not tried as a name yet.
    """

    vectors: VectorStore
    documents: Documents = field(default_factory=Documents)
    rows: DocumentRows = field(default_factory=lambda: DocumentRows(0))
    ids: Ids = field(default_factory=Ids)
    words: Words = field(default_factory=Words)
    columns: Columns = field(default_factory=Columns)
    alive: Mask | None = None
    alive_rows: Mask | None = None
    next_id: int = 0

    def __len__(self) -> int:
        return len(self.documents) - self._gone

    @property
    def _gone(self) -> int:
        return 0 if self.alive is None else len(self.alive) - int(np.count_nonzero(self.alive))

    @classmethod
    def opened(cls, empty: VectorStore, index: SavedIndex) -> Collection:
        """Make one of an index that was opened."""
        derived, documents = index.derived, index.documents
        saved = SavedVectors(
            index.vectors, index.file, index.check_vectors, index.check_lengths, derived
        )
        order, next_id = derived.get("ids.order"), derived.get("ids.next")
        return cls(
            empty.opened(saved),
            documents,
            index.rows,
            Ids(None if order is None or len(order) != len(documents) else order),
            Words(derived),
            Columns(derived),
            next_id=0 if next_id is None else int(next_id[0]),
        )

    def emptied(self) -> Collection:
        """Return one without documents."""
        return Collection(self.vectors.emptied(), next_id=self.next_id)

    def named(self, count: int) -> tuple[list[str], Collection]:
        """Find so many names that no document has."""
        names: list[str] = []
        number = self.next_id
        while len(names) < count:
            tried = [str(n) for n in range(number, number + count - len(names))]
            number += len(tried)
            found = self.ids.find(tried, self.documents, self.alive)
            names += [name for name, its in zip(tried, found, strict=True) if its is None]
        return names, replace(self, next_id=number)

    def added(
        self, documents: Sequence[Document], rows: DocumentRows, vectors: Vectors
    ) -> Collection:
        """Put documents behind these; one whose name is there replaces the old one.

        Raises:
            ValueError: The vectors have another dimension than those that are here.
        """
        found = self.ids.find([d.id for d in documents], self.documents, self.alive)
        old = [number for number in found if number is not None]
        here = self if len(self) > len(old) else self.emptied()
        dimension = here.vectors.dimension
        if dimension and vectors.shape[1] != dimension:
            raise ValueError(
                f"the model's vectors have {vectors.shape[1]} dimensions, "
                f"those already here {dimension}"
            )
        if here is self:
            here = self._marked(old)
        return replace(
            here,
            documents=here.documents.extended(documents),
            rows=here.rows.extended(rows),
            vectors=here.vectors.appended(vectors),
            alive=_longer(here.alive, len(documents)),
            alive_rows=_longer(here.alive_rows, len(vectors)),
        )._tidied()

    def without(self, names: Sequence[str]) -> Collection:
        """Remove documents; names that are not there are passed over."""
        found = self.ids.find(names, self.documents, self.alive)
        return self._marked(sorted({n for n in found if n is not None}))._tidied()

    def _marked(self, numbers: Sequence[int]) -> Collection:
        if not numbers:
            return self
        gone = np.asarray(numbers, np.int64)
        alive = _marked(self.alive, len(self.documents), gone)
        if self.rows.are_whole:
            return replace(self, alive=alive, alive_rows=alive)
        its_rows = self.rows.rows_of(gone)
        return replace(
            self, alive=alive, alive_rows=_marked(self.alive_rows, len(self.rows), its_rows)
        )

    def _tidied(self) -> Collection:
        """Put together what is left, if much is gone."""
        if not len(self):
            return self.emptied()
        gone = 0 if self.alive_rows is None else int(np.count_nonzero(~self.alive_rows))
        if gone * _MOST_GONE <= len(self.rows) or self.vectors.stays_in_file:
            return self
        return self._compacted()

    def _compacted(self) -> Collection:
        if self.alive is None:
            return self
        kept = np.flatnonzero(self.alive)
        return Collection(
            self.vectors.kept(self.rows.rows_of(kept)),
            self.documents.kept(kept),
            self.rows.keep(kept),
            self.ids.kept(kept, self.documents),
            self.words.kept(kept),
            self.columns.kept(kept),
            next_id=self.next_id,
        )

    def merged(self) -> Collection:
        """Return the same without anything that is gone, and in one piece."""
        compact = self._compacted()
        return replace(compact, vectors=compact.vectors.merged())

    def derived(self) -> dict[str, npt.NDArray[Any]]:
        """Return what takes long to compute, as arrays to be saved; of `merged` only.

        All together take at most three tenths of what vectors and texts take in the file. What
        takes longest to make again comes first, and what does not fit is left out.
        """
        texts = sum(map(_bytes_of_line, self.documents))
        total = self.vectors.vectors().nbytes + texts
        most = int(_MOST_DERIVED * total)
        found: dict[str, npt.NDArray[Any]] = {}
        for make in (
            self._derived_ids,
            self._derived_words,
            lambda: self.columns.derived(self.documents, int(_MOST_COLUMNS * total)),
            self.vectors.derived,
        ):
            arrays = make()
            if _bytes_of(found) + _bytes_of(arrays) <= most:
                found |= arrays
        return found

    def _derived_ids(self) -> dict[str, npt.NDArray[Any]]:
        order = self.ids.order(self.documents).astype(np.uint32)
        return {"ids.order": order, "ids.next": np.asarray([self.next_id], np.int64)}

    def _derived_words(self) -> dict[str, npt.NDArray[Any]]:
        try:
            return self.words.derived(self.documents)
        except RagDemoError as error:
            log.debug("an index is saved without its words: %s", error)
            return {}

    def matching(self, where: Any) -> Mask | None:
        """Say which documents match and are there: shape (documents,); None for all."""
        if where is None:
            return self.alive
        found = self.columns.matching(where, self.documents)
        return found if self.alive is None else found & self.alive

    def rows_of(self, allowed: Mask | None) -> Mask | None:
        """Turn what `matching` returned into rows."""
        if allowed is self.alive:
            return self.alive_rows
        return None if allowed is None else self.rows.spread(allowed)

    def id_of_row(self, row: int) -> str:
        """Return the name of a row's document."""
        return self.documents[int(self.rows.owners(np.asarray(row)))].id

    def first(self, numbers: Rows, count: int) -> list[int]:
        """Return those documents whose names come first, in that order."""
        return self.ids.first(numbers, count, self.documents)


def _bytes_of_line(document: Document) -> int:
    """Guess how long a document is in the file, where what is not ASCII takes six bytes."""
    text = document.text
    length = len(text)
    if not text.isascii():
        length += 5 * (length - len(text.encode("ascii", "ignore")))
    return _OF_A_LINE + length + len(document.id) + _OF_A_VALUE * len(document.metadata)


def _bytes_of(arrays: Mapping[str, npt.NDArray[Any]]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _marked(alive: Mask | None, count: int, gone: Rows) -> Mask:
    marked = np.ones(count, bool) if alive is None else alive.copy()
    marked[gone] = False
    return marked


def _longer(alive: Mask | None, count: int) -> Mask | None:
    return None if alive is None else np.append(alive, np.ones(count, bool))
