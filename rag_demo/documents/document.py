"""The ids, texts and metadata of an index's rows: in memory, or read from its file as needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Record", "RecordSource", "Records", "parse_record"]


class Record(NamedTuple):
    """What belongs to one row."""

    id: str
    text: str
    metadata: Mapping[str, Any]


class RecordSource(Protocol):
    """Records that are read when they are asked for."""

    def __len__(self) -> int:
        """How many there are."""

    def read(self, row: int) -> Record:
        """Read one."""


class Records:
    """One record for each row, in order.

    Those of a saved index stay in its file until something asks for all of them: a filter, an
    id, a change. Not safe across threads by itself.
    """

    def __init__(self, source: RecordSource | None = None) -> None:
        self._source = source
        self._all: list[Record] | None = [] if source is None else None
        self._row_of: dict[str, int] | None = None

    def __len__(self) -> int:
        if self._all is not None:
            return len(self._all)
        assert self._source is not None
        return len(self._source)

    def __getitem__(self, row: int) -> Record:
        if self._all is not None:
            return self._all[row]
        assert self._source is not None
        return self._source.read(row)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._loaded())

    def stream(self) -> Iterator[Record]:
        """Yield all of them without keeping them in memory."""
        return (self[row] for row in range(len(self)))

    def row_of(self, name: str) -> int | None:
        """Return the row of an id; None if there is none."""
        return self._rows().get(name)

    def extend(self, records: Sequence[Record]) -> None:
        """Put records behind those that are there; their ids are new."""
        rows, everything = self._rows(), self._loaded()
        rows.update((record.id, row) for row, record in enumerate(records, len(everything)))
        everything.extend(records)

    def keep(self, rows: npt.NDArray[np.int64]) -> None:
        """Keep only these rows, in this order."""
        everything = self._loaded()
        self._all = [everything[row] for row in rows.tolist()]
        self._row_of = None

    def _loaded(self) -> list[Record]:
        if self._all is None:
            assert self._source is not None
            self._all = [self._source.read(row) for row in range(len(self._source))]
            self._source = None
        return self._all

    def _rows(self) -> dict[str, int]:
        if self._row_of is None:
            self._row_of = {record.id: row for row, record in enumerate(self._loaded())}
        return self._row_of


def dump_record(record: Record) -> bytes:
    """Write a record as one line of JSON, in ASCII.

    Raises:
        TypeError, ValueError: The metadata are not JSON.
    """
    fields = {"id": record.id, "text": record.text, "metadata": dict(record.metadata)}
    return json.dumps(fields, ensure_ascii=True).encode("ascii") + b"\n"


def parse_record(line: bytes) -> Record:
    """Read a record back.

    Raises:
        ValueError: It is none.
    """
    try:
        fields = json.loads(line)
    except RecursionError as error:
        raise ValueError(str(error)) from None
    if not (
        isinstance(fields, dict)
        and isinstance(fields.get("id"), str)
        and isinstance(fields.get("text"), str)
        and isinstance(fields.get("metadata"), dict)
    ):
        raise ValueError("a line is no record")
    return Record(fields["id"], fields["text"], fields["metadata"])
