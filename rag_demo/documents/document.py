"""Documents: what is indexed and found; in memory, or read from an index's file as needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rag_demo.documents.metadata import checked_metadata
from rag_demo.errors import shown

__all__ = [
    "Document",
    "DocumentSource",
    "Documents",
    "checked_document",
    "dump_document",
    "parse_document",
]


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
    """A snapshot of a table of documents, by their numbers: those of a file, then those in memory.

    Those of a file stay there, and are read whenever they are asked for. A snapshot never
    changes; `extended` shares the memory of this one, and of the two only the newer may be
    extended again.

    Args:
        source: The file's; None for none.
        chosen: The numbers in the file, in their order, of those that are in the table; all,
            if None.
    """

    def __init__(
        self, source: DocumentSource | None = None, chosen: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._source = source
        self._chosen = chosen
        in_file = 0 if source is None else len(source)
        self._in_file = in_file if chosen is None else len(chosen)
        self._recent: list[Document] = []
        self._count = self._in_file

    def __len__(self) -> int:
        return self._count

    @property
    def in_file(self) -> int:
        """How many of them, the first ones, are in the file."""
        return self._in_file

    def __getitem__(self, number: int) -> Document:
        if number >= self._in_file:
            return self._recent[number - self._in_file]
        assert self._source is not None
        return self._source.read(number if self._chosen is None else int(self._chosen[number]))

    def many(self, numbers: Sequence[int]) -> list[Document]:
        """Return documents by their numbers."""
        if self._in_file:
            return [self[number] for number in numbers]
        return [self._recent[number] for number in numbers]

    def __iter__(self) -> Iterator[Document]:
        """Yield all of them, without keeping those of the file in memory."""
        return self.stream()

    def stream(self, start: int = 0) -> Iterator[Document]:
        """Yield those from a number on; see `__iter__`."""
        return (self[number] for number in range(start, self._count))

    def extended(self, documents: Iterable[Document]) -> Documents:
        """Return a table with more documents behind these."""
        bigger = Documents(self._source, self._chosen)
        bigger._recent = self._recent
        # What an interrupted extension has left behind goes first.
        del bigger._recent[self._count - self._in_file :]
        bigger._recent.extend(documents)
        bigger._count = self._in_file + len(bigger._recent)
        return bigger

    def kept(self, numbers: npt.NDArray[np.int64]) -> Documents:
        """Return a table with only these, whose numbers are in order."""
        split = int(np.searchsorted(numbers, self._in_file))
        chosen = numbers[:split]
        whole = split == self._in_file
        smaller = Documents(
            self._source if split else None,
            self._chosen if whole else chosen if self._chosen is None else self._chosen[chosen],
        )
        smaller._recent = [
            self._recent[number] for number in (numbers[split:] - self._in_file).tolist()
        ]
        smaller._count = smaller._in_file + len(smaller._recent)
        return smaller


def checked_document(document: object) -> Document:
    """Check what a program hands over as a document; its metadata are copied.

    Raises:
        TypeError: It is none, its id or its text is no text, or its metadata are not JSON.
        ValueError: See `rag_demo.documents.metadata.checked_metadata`.
    """
    if not isinstance(document, Document):
        raise TypeError(f"{shown(document)} is no Document")
    for what in ("id", "text"):
        if not isinstance(getattr(document, what), str):
            raise TypeError(f"the {what} of {shown(document)} is no text")
    return document._replace(metadata=checked_metadata(document.metadata, shown(document.id)))


def dump_document(document: Document) -> bytes:
    """Write a document as one line of JSON, in ASCII.

    Raises:
        TypeError, ValueError: The metadata are not JSON; NaN, say, is not.
    """
    fields = {**document._asdict(), "metadata": dict(document.metadata)}
    return json.dumps(fields, ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"


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
