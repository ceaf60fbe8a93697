"""Documents in SQLite, the owners of vectors, and the one way to change both.

Each document has a number. A new document gets the next one, and so does a document that replaces
another. Each row of vectors has an owner: the number of its document, or `GONE`. A document exists
while it owns a row. Nothing else is changed, so older contents stay valid while a search uses them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rag_demo.database import DamagedRowError, Database
from rag_demo.encoding.model_identity import ModelIdentity, refuse_other_model
from rag_demo.reading.document import Document
from rag_demo.stores import filters
from rag_demo.stores.store import EmbeddedBatch, no_vectors
from rag_demo.vectors import Mask, Rows, Take

SCHEMA = (
    "CREATE TABLE documents (number INTEGER PRIMARY KEY, id, text, metadata, file)",
    "CREATE INDEX documents_by_file ON documents (file) WHERE file IS NOT NULL",
    # One row for each value, with item 0, and one for each item of a list, with item 1. The id is
    # a value too.
    "CREATE TABLE metadata (key, item INTEGER, kind INTEGER, value, number INTEGER,"
    " PRIMARY KEY (key, item, kind, value, number)) WITHOUT ROWID",
)
_BATCH = 500  # parameters of a statement; older versions of SQLite accept 999
_SELECT = "SELECT number, id, text, metadata, file FROM documents"
_HAS_ID = f"key = '{filters.ID}' AND item = 0 AND kind = {filters.TEXT} AND value"
_ENCODE = json.JSONEncoder(allow_nan=False).encode

GONE = -1
"""The owner of a row whose document was deleted."""
_MOST_GONE = 1 << 10  # rows or numbers of deleted documents that are never worth a copy
_AT_ONCE = 1 << 11  # documents that are copied together

Passages = npt.NDArray[np.int32]
Self = TypeVar("Self", bound="Contents")


class DocumentTable(Database):
    """The documents of a SQLite database with the tables of `SCHEMA`, for any number of threads.

    Rows are only added: a replaced or deleted document stays where it is, so that older snapshots
    can read it. A mask says which numbers count. The schema ``saved`` may have the documents with
    the first numbers; views in the schema ``temp`` join both.

    Attributes:
        saved: The documents with smaller numbers are those of the schema ``saved``.
    """

    saved = 0

    def insert(self, documents: Iterable[tuple[int, Document]]) -> None:
        """Store documents under their numbers."""
        with self.use() as connection:
            for number, (name, text, metadata, file) in documents:
                row = (number, name, text, _ENCODE(metadata), file)
                connection.execute("INSERT INTO main.documents VALUES (?, ?, ?, ?, ?)", row)
                facts = _facts(number, {**metadata, filters.ID: name})
                query = "INSERT OR IGNORE INTO main.metadata VALUES (?, ?, ?, ?, ?)"
                connection.executemany(query, facts)

    def replace_from(self, first: int, documents: Sequence[Document]) -> None:
        """Store documents under the numbers from ``first`` on, in place of those that have these.

        They are one transaction, unless the writer of a folder has begun one.
        """
        numbered = enumerate(documents, first)
        with self.use() as connection:
            if connection.in_transaction:
                self.insert(numbered)
                return
            # The connection commits or rolls back in C, where no interrupt can hit it.
            with connection:
                self.is_only_here = True
                connection.execute("BEGIN")
                # A change that failed may have left some.
                query = "DELETE FROM main.documents WHERE number >= ?"
                if connection.execute(query, (first,)).rowcount:
                    connection.execute("DELETE FROM main.metadata WHERE number >= ?", (first,))
                self.insert(numbered)

    def get(self, numbers: Sequence[int]) -> list[Document]:
        """Return documents by their numbers; see `columns`."""
        return list(map(Document, *self.columns(numbers)))

    def columns(self, numbers: Sequence[int]) -> tuple[Sequence[Any], ...]:
        """Return ids, texts, metadata and files of documents by their numbers.

        No document shares its metadata with another.

        Raises:
            DamagedRowError: A document is missing or cannot be read.
        """
        query = f"{_SELECT} WHERE number IN ({{}})"
        with self.use():
            found = {row[0]: row for row in self._in_batches(query, sorted({*numbers}))}
            return _columns(_in_order(found, numbers))[1:]

    def ids(self, numbers: Rows) -> list[str]:
        """Return the ids of documents by their numbers."""
        query = "SELECT number, id FROM documents WHERE number IN ({})"
        with self.use():
            found = dict(self._in_batches(query, numbers.tolist()))
            return _in_order(found, numbers.tolist())

    def find(self, ids: Sequence[str], alive: Mask) -> dict[str, int]:
        """Return the numbers of the documents with these ids that count.

        Args:
            ids: The ids; unknown ones are ignored.
            alive: Whether each number counts.
        """
        query = f"SELECT value, number FROM metadata WHERE {_HAS_ID} IN ({{}})"
        return self._find(query, ids, alive)

    def of_files(self, files: Sequence[str], alive: Mask) -> list[str]:
        """Return the ids of the documents that count and were read from files."""
        return list(self._find("SELECT id, number FROM documents WHERE file IN ({})", files, alive))

    def _find(self, query: str, values: Sequence[str], alive: Mask) -> dict[str, int]:
        rows = self._in_batches(query, values)
        return {name: number for name, number in rows
                if number < len(alive) and alive[number]}  # fmt: skip

    def files_in(self, prefix: str) -> list[str]:
        """Return the files whose names begin with a prefix that ends with a separator."""
        bounds = (prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))
        query = "SELECT DISTINCT file FROM documents WHERE file >= ? AND file < ?"
        with self.use() as connection:
            return [file for (file,) in connection.execute(query, bounds)]

    def stream(self, alive: Mask, start: int = 0) -> Iterator[tuple[int, Document]]:
        """Yield the documents that count in the order of their numbers, from a number on."""
        query = f"{_SELECT} WHERE number >= ? AND number < ? ORDER BY number LIMIT ?"
        while True:
            with self.use() as connection:
                rows = connection.execute(query, (start, len(alive), _BATCH)).fetchall()
                known, *columns = _columns([row for row in rows if alive[row[0]]])
            yield from zip(known, map(Document, *columns), strict=True)
            if len(rows) < _BATCH:
                return
            start = rows[-1][0] + 1

    def page(self, alive: Mask, after: str | None = None, limit: int | None = None) -> list[str]:
        """Return the ids of documents that count, in order, from the one after an id on."""
        numbers = np.flatnonzero(alive)
        if 8 * len(numbers) < len(alive):  # They are found faster by their numbers.
            found = (name for name in self.ids(numbers) if after is None or name > after)
            return sorted(found)[:limit]
        query = f"SELECT number, value FROM metadata WHERE {_HAS_ID} >= ? ORDER BY value"
        with self.use() as connection:
            rows = connection.execute(query, (after or "",))
            found = (name for number, name in rows if number < len(alive) and alive[number])
            return list(itertools.islice((name for name in found if name != after), limit))

    def matching(self, where: filters.Where | None, alive: Mask) -> Mask:
        """Tell which documents count and match a filter.

        Args:
            where: The filter; None for all documents.
            alive: Whether each number counts.
        """
        if where is None:
            return alive
        if not callable(where):
            return np.asarray(self._mask(filters.parse_filter(where), len(alive)) & alive, bool)
        matched = np.zeros(len(alive), bool)
        for number, document in self.stream(alive):
            matched[number] = bool(where(document.metadata))
        return matched

    def _mask(self, part: filters.Filter, stop: int) -> Mask:
        if isinstance(part, filters.Group):
            masks = [self._mask(each, stop) for each in part.parts]
            if part.operator == "$not":
                return np.asarray(~masks[0], bool)
            if part.operator == "$or":
                return np.asarray(np.any(masks, axis=0))
            return np.asarray(np.all([np.ones(stop, bool), *masks], axis=0))
        name, key = part.operator, part.key
        if name == "$exists":
            return self._mask_of("item = 0 AND key IN ({})", [key], stop)
        codes: dict[int, list[Any]] = {}
        for value in part.wanted if name == "$in" else [part.wanted]:
            kind, code = filters.encode(value)
            codes.setdefault(kind, []).append(code)
        mask = np.zeros(stop, bool)
        for kind, some in codes.items():
            for test in _tests(name, kind):
                wanted = f"key = ? AND kind = ? AND {test}"
                mask |= self._mask_of(wanted, some, stop, key, kind)
        return mask

    def _mask_of(self, wanted: str, values: Sequence[Any], stop: int, *first: Any) -> Mask:
        """Tell which documents have a row that fulfils a condition."""
        mask = np.zeros(stop, bool)
        # One string of all numbers takes a third of the time of a row for each, and a query of a
        # view that joins both databases three times as long.
        for schema, end in (("saved", self.saved), ("main", stop)):
            if not end:
                continue
            query = f"SELECT group_concat(number) FROM {schema}.metadata WHERE {wanted}"
            for (found,) in self._in_batches(query, values, *first):
                numbers = np.fromstring(found or "", np.int64, sep=",")
                mask[numbers[numbers < min(end, stop)]] = True
        return mask

    def keys(self) -> list[str]:
        """Return the keys of metadata, and the one of the id, in order."""
        with self.use() as connection:
            rows = connection.execute("SELECT DISTINCT key FROM metadata WHERE item = 0")
            return sorted(key for (key,) in rows)

    def _in_batches(self, query: str, values: Sequence[Any], *first: Any) -> list[Any]:
        rows: list[Any] = []
        with self.use() as connection:
            for start in range(0, len(values), _BATCH):
                batch = values[start : start + _BATCH]
                marks = ",".join("?" * len(batch))
                rows += connection.execute(query.format(marks), [*first, *batch])
        return rows


def _tests(name: str, kind: int) -> list[str]:
    """Return SQL tests for values of a kind; a document matches if one is true."""
    if name in filters.COMPARISONS:
        has_order = kind in (filters.NUMBER, filters.TEXT)
        return [f"item = 0 AND value {filters.COMPARISONS[name]} {{}}"] * has_order
    if name != "$contains":
        return ["item = 0 AND value IN ({})"]
    parts = ["item = 0 AND instr(value, {})"] * (kind == filters.TEXT)
    return ["item = 1 AND value IN ({})", *parts]


def _in_order(found: dict[int, Any], numbers: Sequence[int]) -> list[Any]:
    try:
        return [found[number] for number in numbers]
    except KeyError as number:
        raise DamagedRowError(f"document {number} is missing") from None


def _columns(rows: Sequence[tuple[Any, ...]]) -> tuple[Sequence[Any], ...]:
    """Turn rows of `_SELECT` into columns, and decode the metadata."""
    numbers, names, texts, encoded, files = list(zip(*rows, strict=True)) or [()] * 5
    pairs = zip(numbers, encoded, strict=True)
    metadata = [{} if text == "{}" else _metadata(n, text) for n, text in pairs]
    return numbers, names, texts, metadata, files


def _metadata(number: int, encoded: Any) -> Any:
    try:
        return json.loads(encoded)
    except (TypeError, ValueError, RecursionError) as error:
        raise DamagedRowError(f"document {number} cannot be read: {error}") from None


def _facts(number: int, metadata: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[Any, ...]]:
    for key, value in metadata.items():
        items = value if isinstance(value, list) else []
        for item, each in [(0, value), *((1, each) for each in items)]:
            kind, code = filters.encode(each)
            yield prefix + key, item, kind, code, number
        if isinstance(value, Mapping):
            yield from _facts(number, value, f"{prefix}{key}.")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The documents of an index; `with_batch` and `without` return others, or raise.

    Attributes:
        documents: All documents, by number, also those that were replaced or deleted.
        owners: The number of each row's document, or `GONE`: int64.
        spans: Start and stop of each row's passage; 0 and 0 for the whole: shape (rows, 2).
        next_number: The number of the next document.
        identity: The model that made the vectors; None if it is unknown.
    """

    documents: DocumentTable
    owners: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    spans: Passages = field(default_factory=lambda: np.empty((0, 2), np.int32))
    next_number: int = 0
    identity: ModelIdentity | None = None

    @cached_property
    def alive(self) -> Mask:
        """Whether the document of each number exists: shape (next_number,)."""
        alive = np.zeros(self.next_number + 1, bool)
        alive[self.owners] = True  # `GONE` is the last place.
        return alive[:-1]

    @cached_property
    def count(self) -> int:
        """How many documents exist."""
        return int(np.count_nonzero(self.alive))

    @property
    def has_deleted(self) -> bool:
        """Whether something of deleted or replaced documents is kept."""
        return bool((self.owners == GONE).any() or not self.alive.all())

    @property
    def wastes_space(self) -> bool:
        """Whether deleted documents have more than half of the rows, or of the numbers."""
        return any(2 * np.count_nonzero(gone) > max(len(gone), _MOST_GONE)
                   for gone in (self.owners == GONE, ~self.alive))  # fmt: skip

    def with_batch(self: Self, batch: EmbeddedBatch) -> Self:
        """Add documents; a document replaces an older one with its id.

        The caller adds the vectors.

        Raises:
            ValueError, ModelMismatchError: See `rag_demo.stores.store.Store.upsert`.
        """
        refuse_other_model(self.identity if self.count else None, batch.identity)
        first, count = self.next_number, len(batch.documents)
        owners = self._owners_after(self._replaced(batch))
        self.documents.replace_from(first, batch.documents)
        return replace(
            self,
            owners=np.concatenate([owners, batch.owners + first]),
            spans=np.concatenate([self.spans, batch.spans]),
            next_number=first + count,
            identity=self.identity or batch.identity,
        )

    def _replaced(self, batch: EmbeddedBatch) -> dict[int, int]:
        """Return the older documents, each with the number that takes over its vectors, or GONE."""
        older = self.find([each.id for each in batch.documents])
        places = np.flatnonzero(~batch.has_vectors).tolist()
        bare = {batch.documents[place].id: place for place in places}
        for (name, place), before in zip(bare.items(), self.get(list(bare)), strict=True):
            if before is None or before.text != batch.documents[place].text:
                raise no_vectors(name)
        first = self.next_number
        return {n: first + bare[name] if name in bare else GONE for name, n in older.items()}

    def without(self: Self, ids: Sequence[str]) -> Self:
        """Remove documents; unknown ids are ignored."""
        gone = dict.fromkeys(self.find(ids).values(), GONE)
        return replace(self, owners=self._owners_after(gone))

    def _owners_after(self, changes: Mapping[int, int]) -> Rows:
        """Return the owners of the rows after documents have given theirs away, or up."""
        if not changes:
            return self.owners
        new = np.arange(self.next_number + 1)
        new[-1] = GONE  # `GONE` is the last place.
        new[list(changes)] = list(changes.values())
        return np.asarray(new[self.owners], np.int64)

    def find(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the numbers of the existing documents with these ids."""
        return self.documents.find(ids, self.alive) if self.count else {}

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """Return a document for each id; None for an unknown one."""
        number_of = self.find(ids)
        found = dict(zip(number_of, self.documents.get(list(number_of.values())), strict=True))
        return [found.get(name) for name in ids]

    def matching(
        self, where: filters.Where | None, after: str | None = None, limit: int | None = None
    ) -> list[str]:
        """Return the ids of documents that match a filter; see `Store.matching`."""
        return self.documents.page(self.documents.matching(where, self.alive), after, limit)

    def batches(self, take: Take) -> Iterator[EmbeddedBatch]:
        """Yield all documents with their vectors.

        Args:
            take: Returns the vectors of rows.
        """
        numbers, order = np.flatnonzero(self.alive), np.argsort(self.owners, kind="stable")
        ordered = self.owners[order]
        for start in range(0, len(numbers), _AT_ONCE):
            some = numbers[start : start + _AT_ONCE]
            first, last = np.searchsorted(ordered, [some[0], some[-1] + 1])
            rows = order[first:last]
            places: Any = np.searchsorted(some, self.owners[rows])
            documents = self.documents.get(some.tolist())
            yield EmbeddedBatch(documents, places, self.spans[rows], take(rows), self.identity)
