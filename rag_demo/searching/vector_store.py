"""What a retriever asks of the place where its vectors are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rag_demo.searching.exact_scores import Scores
from rag_demo.vectors import Rows, Vectors

__all__ = ["FileOfVectors", "Pairs", "SavedVectors", "VectorStore"]

_FEW_BYTES = 1 << 26  # are checked at once, which takes 30 ms
_PARTS = 16
_MOST_OFF = 1e-3  # of a length that should be 1


class Pairs(NamedTuple):
    """Queries and rows that may be among their best.

    Attributes:
        query: The number of each pair's query, sorted: shape (p,).
        row: Shape (p,).
        scores: As of `exact_scores`, if they are known already: shape (p,).
    """

    query: Rows
    row: Rows
    scores: Scores | None = None


class FileOfVectors(Protocol):
    """A mapped file that holds vectors as its last bytes."""

    resident: bool

    def __len__(self) -> int:
        """How many bytes it has."""

    def check(self, starts: Rows, nbytes: int) -> None:
        """Check stretches of so many bytes each."""

    def drop(self, start: int = 0, nbytes: int | None = None) -> None:
        """Let go of resident pages."""


@dataclass
class SavedVectors:
    """The vectors of an opened index, which are checked before they are used.

    Attributes:
        vectors: Shape (n, d), mapped.
        file: Where they are.
        check: Checks all of them; raises if they are not what was written.
        check_lengths: Raises if a file was cut off, in microseconds.
        derived: What was computed of them when they were saved, by name.
    """

    vectors: Vectors
    file: FileOfVectors | None
    check: Callable[[], None]
    check_lengths: Callable[[], None]
    derived: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    _is_checked: bool = False
    _has_answered: bool = False
    _passed: int = 0

    def check_all(self) -> None:
        """Check everything, once."""
        if not self._is_checked:
            self.check()
            self._is_checked = True

    def has(self, names: Iterable[str]) -> bool:
        """Whether all these arrays were saved; none of them is read."""
        return all(name in self.derived for name in names)

    def is_checked_soon(self) -> bool:
        """Check a part of them, and say whether all are checked by now.

        So the searches after the first, which has other things to check, take a little longer,
        and none takes a second.
        """
        if self._is_checked or self.file is None or self.vectors.nbytes <= _FEW_BYTES:
            self.check_all()
            return True
        if not self._has_answered:
            self._has_answered = True
            return False
        stop = min(self._passed + -(-len(self.vectors) // _PARTS), len(self.vectors))
        some = self.vectors[self._passed : stop]
        header = len(self.file) - self.vectors.nbytes
        start = header + self._passed * self.vectors.strides[0]
        self.file.check(np.asarray([start]), some.nbytes)
        if not (np.abs(np.einsum("ij,ij->i", some, some) - 1) < _MOST_OFF).all():
            self.check()  # Says which, and raises.
        self._passed = stop
        self._is_checked = stop == len(self.vectors)
        return False  # This time it was not.

    def checked(self, rows: Rows) -> Vectors:
        """Return the vectors of rows; of the file only what these are in is checked."""
        if not self._is_checked and self.file is not None:
            row_bytes = self.vectors.strides[0]
            header = len(self.file) - self.vectors.nbytes
            self.file.check(header + rows * row_bytes, row_bytes)
        taken: Vectors = self.vectors[rows]
        return taken


class VectorStore(ABC):
    """Rows of vectors of length 1, in order. A snapshot: a change returns another one.

    They share what they can, so of two only the newer may be changed again. A change that is
    interrupted, or fails, has changed nothing.
    """

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Length of the vectors; 0 while there are none."""

    @abstractmethod
    def appended(self, vectors: Vectors) -> VectorStore:
        """Return one with more vectors behind these: shape (n, d)."""

    @abstractmethod
    def kept(self, rows: Rows) -> VectorStore:
        """Return one with only these rows, in this order."""

    @abstractmethod
    def opened(self, saved: SavedVectors) -> VectorStore:
        """Return one with the vectors of an index in place of these."""

    @abstractmethod
    def emptied(self) -> VectorStore:
        """Return one without vectors."""

    @abstractmethod
    def vectors(self, rows: Rows | None = None) -> Vectors:
        """Return the vectors of rows, by default all: shape (n, d)."""

    @abstractmethod
    def storage(self) -> tuple[str, str, int]:
        """Return the device, the dtype that is searched in, and the bytes of the vectors."""

    @abstractmethod
    def candidates(
        self, queries: Vectors, top_k: int, allowed: npt.NDArray[np.bool_] | None
    ) -> Pairs:
        """Find the ``top_k`` best rows of each query, and all that might tie with them.

        Args:
            queries: Shape (b, d), each of length 1.
            top_k: At most as many as there are.
            allowed: Shape (rows,): look only at these; None for all.

        Returns:
            Pairs of a query and a row, sorted by the query.
        """

    @property
    def stays_in_file(self) -> bool:
        """Whether the vectors are in a file because there is no room for them in memory."""
        return False

    def check(self) -> None:
        """Raise if what is mapped was cut off, which would end the process.

        Raises:
            IndexFileError: It was.
        """
        return

    def merged(self) -> VectorStore:
        """Return one with the same rows in as few pieces as possible."""
        return self

    def derived(self) -> dict[str, npt.NDArray[Any]]:
        """Return what is worth saving with the vectors, because it takes long to compute."""
        return {}
