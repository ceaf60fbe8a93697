"""Documents: what is indexed and found; in memory, or read from an index's file as needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Document", "DocumentSource", "Documents", "dump_document", "parse_document"]


class Document(NamedTuple):
    """One text to index, its name, and what is known about it."""

    id: str
    text: str
    metadata: Mapping[str, Any]


class DocumentSource(Protocol):
    """Documents that are read when they are asked for."""

    def __len__(self) -> int:
        """How many there are."""

    def read(self, number: int) -> Document:
        """Read one."""


class Documents:
    """The documents of an index, by their numbers and their ids.

    Those of a saved index stay in its file until something asks for all of them: a filter, an
    id, a change. Not safe across threads by itself.
    """

    def __init__(self, source: DocumentSource | None = None) -> None:
        self._source = source
        self._all: list[Document] | None = [] if source is None else None
        self._number_of: dict[str, int] | None = None

    def __len__(self) -> int:
        if self._all is not None:
            return len(self._all)
        assert self._source is not None
        return len(self._source)

    def __getitem__(self, number: int) -> Document:
        if self._all is not None:
            return self._all[number]
        assert self._source is not None
        return self._source.read(number)

    def __iter__(self) -> Iterator[Document]:
        return iter(self._loaded())

    def stream(self) -> Iterator[Document]:
        """Yield all of them without keeping them in memory."""
        return (self[number] for number in range(len(self)))

    def number_of(self, name: str) -> int | None:
        """Return the number of an id; None if there is none."""
        return self._numbers().get(name)

    def extend(self, documents: Sequence[Document]) -> None:
        """Put documents behind those that are there; their ids are new."""
        numbers, everything = self._numbers(), self._loaded()
        new = enumerate(documents, len(everything))
        numbers.update((document.id, number) for number, document in new)
        everything.extend(documents)

    def keep(self, numbers: npt.NDArray[np.int64]) -> None:
        """Keep only these, in this order."""
        everything = self._loaded()
        self._all = [everything[number] for number in numbers.tolist()]
        self._number_of = None

    def _loaded(self) -> list[Document]:
        if self._all is None:
            assert self._source is not None
            self._all = [self._source.read(number) for number in range(len(self._source))]
            self._source = None
        return self._all

    def _numbers(self) -> dict[str, int]:
        if self._number_of is None:
            numbered = enumerate(self._loaded())
            self._number_of = {document.id: number for number, document in numbered}
        return self._number_of


def dump_document(document: Document) -> bytes:
    """Write a document as one line of JSON, in ASCII.

    Raises:
        TypeError, ValueError: The metadata are not JSON.
    """
    fields = {**document._asdict(), "metadata": dict(document.metadata)}
    return json.dumps(fields, ensure_ascii=True).encode("ascii") + b"\n"


def parse_document(line: bytes) -> Document:
    """Read a document back.

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
        raise ValueError("a line is no document")
    return Document(fields["id"], fields["text"], fields["metadata"])
