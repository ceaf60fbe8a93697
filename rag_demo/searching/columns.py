"""The metadata of a table of documents by column, as far as somebody has asked for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Documents
from rag_demo.searching.column import MISSING, Column
from rag_demo.searching.filters import Where, conditions_of, fulfils

__all__ = ["Columns"]

Array = npt.NDArray[Any]

_PREFIX = "columns1."
_ENOUGH = 1 << 9  # documents that are worth a column; fewer are looked at one by one
_MOST_COLUMNS = 64  # are kept: those whose keys come first


class Columns:
    """The columns of a table of documents and of all that extend it.

    It learns of documents that were added when it is asked, some hundreds at a time. An
    interruption at any moment leaves it right. Not safe across threads by itself.

    Args:
        kept: The arrays of `derived`, of the documents that are in the file.
    """

    def __init__(self, kept: Mapping[str, Array] | None = None) -> None:
        self._kept = kept or {}
        self._columns: dict[str, tuple[Column, ...]] = {}

    def matching(self, where: Where, documents: Documents) -> npt.NDArray[np.bool_]:
        """Say which documents match, whether they are alive or not: shape (documents,)."""
        if callable(where):
            return np.fromiter(
                (bool(where(document.metadata)) for document in documents), bool, len(documents)
            )
        result = np.ones(len(documents), bool)
        for condition in conditions_of(where):
            key, name, wanted = condition
            start = 0
            for column in self._columns_of(key, documents):
                result[start : start + len(column)] &= column.matches(condition)
                start += len(column)
            for number in range(start, len(documents)):
                metadata = documents[number].metadata
                result[number] &= key in metadata and fulfils(metadata[key], name, wanted)
        return result

    def kept(self, numbers: npt.NDArray[np.int64]) -> Columns:
        """Return those of a table that has only these documents, whose numbers are in order."""
        smaller = Columns()
        for key in {*self._columns, *self._kept_keys()}:
            columns, start = [], 0
            for column in self._columns.get(key) or self._restored(key):
                stop = start + len(column)
                its = slice(*np.searchsorted(numbers, (start, stop)))
                codes = column.codes[numbers[its] - start]
                columns.append(Column(codes, column.numbers, column.texts, column.others))
                start = stop
            smaller._columns[key] = tuple(columns)
        return smaller

    def derived(self, documents: Documents, most_bytes: int) -> dict[str, Array]:
        """Return what makes them again, as arrays; what would be too large is left out."""
        names: list[str] = []
        found: dict[str, Array] = {}
        for key, values in _values_by_key(documents).items():
            column = Column.of_values(values)
            arrays = {} if column is None else column.arrays()
            nbytes = sum(array.nbytes for array in arrays.values())
            if arrays and nbytes <= most_bytes:
                most_bytes -= nbytes
                found |= {f"{_PREFIX}{len(names)}.{name}": its for name, its in arrays.items()}
                names.append(key)
        found[_PREFIX + "keys"] = np.frombuffer(json.dumps(names).encode(), np.uint8)
        return found

    def _columns_of(self, key: str, documents: Documents) -> Sequence[Column]:
        columns = self._columns.get(key)
        if columns is None:
            columns = self._restored(key)
        start = sum(map(len, columns))
        if len(documents) - start >= _ENOUGH:
            column = Column.of(key, (each.metadata for each in documents.stream(start)))
            columns = columns if column is None else (*columns, column)
        self._columns[key] = columns
        return columns

    def _kept_keys(self) -> list[str]:
        keys = self._kept.get(_PREFIX + "keys")
        return [] if keys is None else list(json.loads(bytes(keys)))

    def _restored(self, key: str) -> tuple[Column, ...]:
        keys = self._kept_keys()
        if key not in keys:
            return ()
        prefix = f"{_PREFIX}{keys.index(key)}."
        names = [name for name in self._kept if name.startswith(prefix)]
        column = Column.restored({name[len(prefix) :]: self._kept[name] for name in names})
        return (column,)


def _values_by_key(documents: Documents) -> dict[str, list[Any]]:
    """Read all metadata once; a document without a key has `MISSING`."""
    found: dict[str, list[Any]] = {}
    for number, document in enumerate(documents):
        for key, value in document.metadata.items():
            values = found.get(key)
            if values is None:
                if len(found) == _MOST_COLUMNS:
                    continue
                values = found[key] = []
            values += [MISSING] * (number - len(values))
            values.append(value)
    for values in found.values():
        values += [MISSING] * (len(documents) - len(values))
    return found
