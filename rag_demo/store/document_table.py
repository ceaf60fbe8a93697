"""Documents with their metadata in SQLite, by numbers that are never used again."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document
from rag_demo.store.filters import (
    NUMBER,
    TEXT,
    AnyOf,
    Condition,
    Filter,
    Not,
    Where,
    encode,
    parse_filter,
)

__all__ = ["SCHEMA", "DamagedRowError", "DocumentTable"]

_OF_PARENTS: list[object] = []  # connections, in a forked child

SCHEMA = (
    "CREATE TABLE documents"
    " (number INTEGER PRIMARY KEY, id, text, metadata, file, checksum INTEGER)",
    "CREATE INDEX documents_by_id ON documents (id)",
    "CREATE INDEX documents_by_file ON documents (file) WHERE file IS NOT NULL",
    # One row for each value of a document, and one for each item of a list: of these ``item`` is 1.
    "CREATE TABLE metadata (key, item INTEGER, kind INTEGER, value, number INTEGER,"
    " PRIMARY KEY (key, item, kind, value, number)) WITHOUT ROWID",
)
_AT_ONCE = 500  # parameters of a statement; older SQLite takes 999
_SELECT = "SELECT number, id, text, metadata, file, checksum FROM documents"
_ENCODE = json.JSONEncoder(allow_nan=False).encode
_SQL = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}

Mask = npt.NDArray[np.bool_]
MetadataRow = tuple[Any, int, int, Any, int]


_TABLES: weakref.WeakSet[DocumentTable] = weakref.WeakSet()


def _after_fork() -> None:
    for table in list(_TABLES):
        table._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class DamagedRowError(Exception):
    """A document is not what was written."""


class DocumentTable:
    """The documents of one SQLite database.

    Threads may share it: they take turns. In a forked child the database is opened again.

    Args:
        connect: Opens the database, whose tables are those of `SCHEMA`.
        errors: Turns what SQLite raises, and `DamagedRowError`, into another error.
    """

    _is_in_memory = False

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        errors: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._connect, self._errors = connect, errors
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        _TABLES.add(self)
        with self.database():
            pass

    @classmethod
    def in_memory(cls) -> DocumentTable:
        """Make an empty one, which a forked child has too."""

        def connect() -> sqlite3.Connection:
            database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
            for statement in SCHEMA:
                database.execute(statement)
            return database

        table = cls(connect)
        table._is_in_memory = True
        return table

    @contextlib.contextmanager
    def database(self) -> Iterator[sqlite3.Connection]:
        """Lock and yield the connection."""
        with self._lock, self._errors():
            if self._connection is None:
                self._connection = self._connect()
                self._finalizer = weakref.finalize(self, self._connection.close)
                self._finalizer.atexit = False
            yield self._connection

    def close(self) -> None:
        """Close the connection."""
        if self._finalizer is not None:
            self._finalizer()

    def _leave_to_parent(self) -> None:
        """In a forked child, forget the connection of the parent process."""
        self._lock = threading.RLock()
        if self._finalizer is not None and not self._is_in_memory:
            # SQLite forbids to use it, and to close it, which a collection would do.
            _OF_PARENTS.append(self._connection)
            self._finalizer.detach()
            self._connection = self._finalizer = None

    def insert(self, documents: Iterable[tuple[int, Document]]) -> int:
        """Store documents under their numbers; return how many they are."""
        with self.database() as database:
            pairs, count = iter(documents), 0
            while some := list(islice(pairs, 4 * _AT_ONCE)):
                database.executemany(
                    "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?)",
                    [_document_row(number, document) for number, document in some],
                )
                database.executemany(
                    "INSERT OR IGNORE INTO metadata VALUES (?, ?, ?, ?, ?)",
                    (row for number, document in some for row in _metadata_rows(number, document)),
                )
                count += len(some)
            return count

    def replace_from(self, first: int, documents: Sequence[Document]) -> None:
        """Store documents from a number on, in place of those that are there; all or nothing."""
        with self.database() as database:
            if database.in_transaction:
                database.rollback()  # One that was interrupted where it could not say so.
            database.execute("BEGIN")
            try:
                question = "SELECT number FROM documents WHERE number >= ?"
                self.delete([number for (number,) in database.execute(question, (first,))])
                self.insert(enumerate(documents, first))
            except BaseException:  # An interrupt too leaves nothing half done.
                database.rollback()
                raise
            database.commit()

    def delete(self, numbers: Sequence[int]) -> None:
        """Remove documents and their metadata."""
        with self.database() as database:
            for number, document in zip(numbers, self.get(numbers), strict=True):
                database.executemany(
                    "DELETE FROM metadata WHERE key = ? AND item = ? AND kind = ? AND value = ?"
                    " AND number = ?",
                    _metadata_rows(number, document),
                )
            database.executemany(
                "DELETE FROM documents WHERE number = ?", [(number,) for number in numbers]
            )

    def get(self, numbers: Sequence[int]) -> list[Document]:
        """Return documents by their numbers.

        Raises:
            DamagedRowError: One is missing or is not what was written.
        """
        question = f"{_SELECT} WHERE number IN ({{}})"
        with self.database():
            found = {row[0]: _document(row) for row in self._many(question, numbers)}
            return [_present(found, number) for number in numbers]

    def ids(self, numbers: Sequence[int]) -> list[str]:
        """Return the ids of documents by their numbers."""
        question = "SELECT number, id FROM documents WHERE number IN ({})"
        with self.database():
            found = dict(self._many(question, numbers))
            return [_text(_present(found, number)) for number in numbers]

    def find(self, ids: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Yield each id that is there with the number of its document."""
        question = "SELECT id, number FROM documents WHERE id IN ({})"
        for name, number in self._many(question, list(map(_storable, ids))):
            yield _text(name), number

    def of_file(self, file: str) -> list[Document]:
        """Return the documents that were read from a file, in any order."""
        with self.database() as database:
            rows = database.execute(f"{_SELECT} WHERE file = ?", (_storable(file),)).fetchall()
            return list(map(_document, rows))

    def stream(self, start: int = 0) -> Iterator[tuple[int, Document]]:
        """Yield documents in the order of their numbers, from a number on."""
        question = f"{_SELECT} WHERE number >= ? ORDER BY number LIMIT ?"
        while True:
            with self.database() as database:
                rows = database.execute(question, (start, _AT_ONCE)).fetchall()
                documents = [(row[0], _document(row)) for row in rows]
            yield from documents
            if len(rows) < _AT_ONCE:
                return
            start = rows[-1][0] + 1

    def matching(self, where: Where, first: int, stop: int) -> Mask:
        """Say which documents with numbers from ``first`` to ``stop`` match: shape (stop - first,).

        A number without a document may match as well.
        """
        if callable(where):
            matched = np.zeros(stop - first, bool)
            for number, document in self.stream(first):
                if number < stop:
                    matched[number - first] = bool(where(document.metadata))
            return matched
        return self._mask(parse_filter(where), first, stop)

    def _mask(self, part: Filter, first: int, stop: int) -> Mask:
        if isinstance(part, Not):
            return np.asarray(~self._mask(part.part, first, stop), bool)
        if isinstance(part, Condition):
            return self._documents_with([part], first, stop)
        if isinstance(part, AnyOf):
            masks = [self._mask(each, first, stop) for each in part.parts]
            return np.asarray(np.logical_or.reduce(masks), bool)
        # What is asked of one key is one question, so that a range is read once.
        by_key: dict[str, list[Condition]] = {}
        others: list[Filter] = []
        for each in part.parts:
            if isinstance(each, Condition) and each.operator != "$contains":
                by_key.setdefault(each.key, []).append(each)
            else:
                others.append(each)
        masks = [self._documents_with(its, first, stop) for its in by_key.values()]
        masks += [self._mask(each, first, stop) for each in others]
        return np.asarray(np.logical_and.reduce([np.ones(stop - first, bool), *masks]), bool)

    def _documents_with(self, conditions: Sequence[Condition], first: int, stop: int) -> Mask:
        """Say which documents fulfil all conditions, which are of one key."""
        clauses, parameters = [], [_storable(conditions[0].key)]
        for condition in conditions:
            clause, values = _clause_of(condition)
            clauses.append(clause)
            parameters += values
        question = f"SELECT number FROM metadata WHERE key = ? AND {' AND '.join(clauses)}"
        with self.database() as database:
            rows = database.execute(question, parameters).fetchall()
        numbers = np.fromiter((row[0] for row in rows), np.int64, len(rows))
        mask = np.zeros(stop - first, bool)
        mask[numbers[(numbers >= first) & (numbers < stop)] - first] = True
        return mask

    def _many(self, question: str, values: Sequence[Any]) -> list[Any]:
        rows: list[Any] = []
        with self.database() as database:
            for start in range(0, len(values), _AT_ONCE):
                some = list(values[start : start + _AT_ONCE])
                rows += database.execute(question.format(",".join("?" * len(some))), some)
        return rows

    def check(self) -> int:
        """Compare all documents with their checksums and with the index of their metadata.

        Returns:
            How many documents there are.

        Raises:
            DamagedRowError: Something is not what was written.
        """
        with self.database() as database:
            (found,) = database.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise DamagedRowError(found)
            count = expected = present = 0
            for number, document in self.stream():
                count += 1
                expected += sum(zlib.crc32(repr(row).encode("utf-8", "surrogatepass"))
                                for row in set(_metadata_rows(number, document)))  # fmt: skip
            for row in database.execute("SELECT key, item, kind, value, number FROM metadata"):
                present += zlib.crc32(repr(row).encode("utf-8", "surrogatepass"))
        if expected != present:
            raise DamagedRowError("the index of metadata does not fit the documents")
        return count


def _clause_of(condition: Condition) -> tuple[str, list[Any]]:
    """Return the part of a WHERE clause, and its parameters, for one value of a document."""
    name = condition.operator
    several = condition.wanted if name in ("$in", "$nin") else [condition.wanted]
    codes = [(kind, _storable(code)) for kind, code in map(encode, several)]
    if name in _SQL:
        kind, bound = codes[0]
        # No kind is -1: a number or a text is all that has an order.
        kind = kind if kind in (NUMBER, TEXT) else -1
        return f"item = 0 AND kind = ? AND value {_SQL[name]} ?", [kind, bound]
    if name == "$contains":
        kind, code = codes[0]
        clause = (
            "(item = 1 AND kind = ? AND value = ? OR item = 0 AND kind = ? AND instr(value, ?))"
        )
        return clause, [kind, code, TEXT if kind == TEXT else -1, code]
    by_kind: dict[int, list[Any]] = {}
    for kind, code in codes:
        by_kind.setdefault(kind, []).append(code)
    parts = [
        f"kind = {kind} AND value IN ({','.join('?' * len(its))})" for kind, its in by_kind.items()
    ]
    negation = "NOT " if name in ("$ne", "$nin") else ""
    values = [code for its in by_kind.values() for code in its]
    return f"item = 0 AND {negation}({' OR '.join(parts) or '0'})", values


def _present(found: dict[int, Any], number: int) -> Any:
    try:
        return found[number]
    except KeyError:
        raise DamagedRowError(f"document {number} is missing") from None


def _document_row(number: int, document: Document) -> tuple[Any, ...]:
    name, text, file = map(_storable, (document.id, document.text, document.file))
    metadata = _ENCODE(document.metadata) if document.metadata else "{}"
    return number, name, text, metadata, file, _checksum(number, name, text, metadata, file)


def _document(row: tuple[Any, ...]) -> Document:
    number, *parts, checksum = row
    name, text, metadata, file = parts
    try:
        if checksum != _checksum(number, *parts):
            raise DamagedRowError(f"the checksum of document {number} is wrong")
        known = {} if metadata == "{}" else json.loads(metadata)
        return Document(_text(name), _text(text), known, None if file is None else _text(file))
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        raise DamagedRowError(f"document {number} cannot be read: {error}") from None


def _checksum(number: int, *parts: Any) -> int:
    found = number & 0xFFFFFFFF
    for part in parts:
        if part is not None:
            found = zlib.crc32(part if isinstance(part, bytes) else part.encode(), found)
    return found


def _metadata_rows(number: int, document: Document) -> Iterator[MetadataRow]:
    for key, value in document.metadata.items():
        name = _storable(key)
        kind, code = encode(value)
        yield name, 0, kind, _storable(code), number
        if isinstance(value, list):
            for item in value:
                kind, code = encode(item)
                yield name, 1, kind, _storable(code), number


def _storable(value: Any) -> Any:
    """Return what SQLite takes: a text with lone surrogates, which it does not, as bytes."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogatepass")
    return value


def _text(value: Any) -> str:
    return value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else str(value)
