"""Ids: which document has a name, and how names are ordered."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Documents

__all__ = ["Ids", "first_twice"]

Numbers = npt.NDArray[np.int64]
Alive = npt.NDArray[np.bool_] | None

_FEW = 64  # names that are looked up one by one in a file


class Ids:
    """The names of a table of documents and of all that extend it.

    It learns of documents that were added when it is asked; what it knows beyond the table that
    it is asked about, or of documents that are gone, it leaves out. So an interruption at any
    moment leaves it right. Not safe across threads by itself.

    Args:
        order: The numbers of the documents in the file, sorted by their names: shape (n,).
            Made when it is needed, if None.
    """

    def __init__(self, order: Numbers | None = None) -> None:
        self._order = order
        self._place: Numbers | None = None
        self._in_file: dict[str, int] | None = None
        self._recent: dict[str, int] = {}
        self._known = -1  # documents whose names are in `_recent`; -1 before the file's are passed

    def find(self, names: Sequence[str], documents: Documents, alive: Alive) -> list[int | None]:
        """Return the number of each name; None where there is none that is alive."""
        self._catch_up(documents)
        if len(names) > _FEW and documents.in_file and self._in_file is None:
            stream = zip(documents.stream(), range(documents.in_file), strict=False)
            self._in_file = {document.id: number for document, number in stream}
        found: list[int | None] = []
        for name in names:
            number = self._recent.get(name)
            if number is None and documents.in_file:
                number = self._find_in_file(name, documents)
            gone = number is None or (alive is not None and not alive[number])
            found.append(None if gone else number)
        return found

    def first(self, numbers: Numbers, count: int, documents: Documents) -> list[int]:
        """Return those documents whose names come first, in the order of their names."""
        if len(numbers) > _FEW and self._order is not None and numbers.max() < documents.in_file:
            if self._place is None:
                place = np.empty(len(self._order), np.int64)
                place[self._order] = np.arange(len(place))
                self._place = place
            return list(numbers[np.argsort(self._place[numbers])[:count]].tolist())
        return heapq.nsmallest(count, numbers.tolist(), key=lambda number: documents[number].id)

    def order(self, documents: Documents) -> Numbers:
        """Return the numbers of all documents, sorted by their names."""
        if self._order is not None and len(documents) == documents.in_file:
            return self._order
        names = [document.id for document in documents]
        return np.asarray(sorted(range(len(names)), key=names.__getitem__), np.int64)

    def kept(self, numbers: Numbers, documents: Documents) -> Ids:
        """Return those of a table that has only these documents, whose numbers are in order."""
        if self._order is None:
            return Ids()
        in_file = numbers[: np.searchsorted(numbers, documents.in_file)]
        new = np.full(documents.in_file, -1, np.int64)
        new[in_file] = np.arange(len(in_file))
        order = new[self._order]
        return Ids(order[order >= 0])

    def _catch_up(self, documents: Documents) -> None:
        start = max(self._known, documents.in_file)
        if start < len(documents):
            new = enumerate(documents.stream(start), start)
            self._recent.update((document.id, number) for number, document in new)
        self._known = len(documents)

    def _find_in_file(self, name: str, documents: Documents) -> int | None:
        if self._in_file is not None:
            return self._in_file.get(name)
        if self._order is None:
            in_file = [documents[number].id for number in range(documents.in_file)]
            self._order = np.asarray(sorted(range(len(in_file)), key=in_file.__getitem__), np.int64)
        low, high = 0, len(self._order)
        while low < high:
            middle = (low + high) // 2
            if documents[int(self._order[middle])].id < name:
                low = middle + 1
            else:
                high = middle
        if low == len(self._order):
            return None
        number = int(self._order[low])
        return number if documents[number].id == name else None


def first_twice(names: Iterable[str]) -> str | None:
    """Return a name that stands twice; None if there is none."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
