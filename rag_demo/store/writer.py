"""A saved index as it is written: one writer at a time, in transactions."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rag_demo.documents.document import Document
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import DamagedIndexError, IndexFileError, RagDemoError, damaged
from rag_demo.exact_search.rounding import BLOCK, round_to_int8
from rag_demo.store.document_table import DocumentTable
from rag_demo.store.facts import (
    DATABASE,
    GONE,
    OUR_FILES,
    SEGMENT,
    SEGMENT_COLUMNS,
    TABLES,
    IndexFacts,
    Passages,
    Segment,
    as_bytes,
    checksum_of,
    is_busy,
    read_facts_of,
    read_words,
    refuse_foreign_folder,
    writing_errors,
)
from rag_demo.store.words import Words
from rag_demo.vectors import Rows, Vectors

__all__ = ["IndexWriter", "open_or_replace", "remove_index"]

_WORDS_BEHIND = 1 << 13
"""Documents that may be committed before their words are: who opens the index adds these."""

log = logging.getLogger("rag_demo")


class IndexWriter:
    """The one writer of an index: use it with ``with``; changes are lost unless you call `commit`.

    Nobody else can write meanwhile; readers go on. A folder that was made for an index that was
    not committed is removed.

    Args:
        folder: Of the index; it is made if it is missing.

    Attributes:
        facts: What is going to be committed; None in a folder without an index.
        owners: The number of the document that each row belongs to.

    Raises:
        IndexFileError: The folder holds something else, cannot be written, or another process
            writes into it.
    """

    def __init__(self, folder: Path) -> None:
        refuse_foreign_folder(folder)
        self.folder = folder
        self.facts: IndexFacts | None = None
        self._made_folders = [each for each in (folder, *folder.parents) if not each.exists()]
        # Until this is the only writer, and knows that there is no index, it removes nothing.
        self._is_index = True
        self._made_files = False
        self._database: sqlite3.Connection | None = None
        self._words: Words | None = None
        try:
            with writing_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                self._connect()
                database = self._connection
                # Not of this writer: in a cycle it would keep its lock until a collection.
                self._table = DocumentTable(lambda: database)
                self._begin()
                self._is_index = self.facts is not None
        except BaseException:  # An interrupt too: nobody else closes this.
            self.__exit__()
            raise

    def _connect(self) -> None:
        path = self.folder / DATABASE
        for _ in range(20):
            is_new = not path.exists()
            self._database = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
            try:
                self._database.execute("PRAGMA synchronous = FULL")
                self._database.execute("PRAGMA journal_mode = WAL")
                self._database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                # A full disk, say; a database that another writer is making is locked.
                self._is_index = not is_new or is_busy(error)
                raise
            if path.exists():  # Else another writer has failed, and removed what it had made.
                return
            self._database.close()
        raise sqlite3.OperationalError("the database is locked")

    def _begin(self) -> None:
        if not self._connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            for statement in TABLES:
                self._connection.execute(statement)
        if self._connection.execute("SELECT 1 FROM facts").fetchone():
            self.facts = read_facts_of(self.folder, self._connection)
        owners = [segment.owners for segment in self._segments()]
        self.owners: Rows = np.concatenate([np.empty(0, np.int64), *owners])

    def _segments(self) -> list[Segment]:
        question = f"SELECT {SEGMENT_COLUMNS} ORDER BY number"
        return [Segment.of(row) for row in self._connection.execute(question)]

    @property
    def documents(self) -> DocumentTable:
        """The documents, as they are going to be."""
        return self._table

    def clear(self, model: ModelIdentity, *, source: str | None = None) -> None:
        """Forget everything, and begin new files; the old ones are removed by `commit`."""
        before = self.facts or IndexFacts(model)
        with writing_errors(self.folder):
            for table in ("documents", "metadata", "segments", "words"):
                self._connection.execute(f"DELETE FROM {table}")
        self.owners = np.empty(0, np.int64)
        self._words = None
        self.facts = IndexFacts(
            model,
            source,
            generation=before.generation,
            files=before.files + 1,
            identity=os.urandom(8).hex(),
        )

    def append(
        self,
        documents: Iterable[tuple[int, Document]],
        owners: Rows,
        passages: Passages,
        vectors: Iterable[Vectors],
        next_number: int,
    ) -> None:
        """Put rows, and documents with their numbers, behind those that are there.

        Args:
            documents: With numbers that are not smaller than ``facts.next_number``.
            owners: The number of the document of each row, or `GONE`: shape (n,).
            passages: Start and stop of the span that each row stands for; 0 and 0 for the whole
                document: shape (n, 2).
            vectors: Their vectors, in pieces: shape (m, d), float32.
            next_number: ``facts.next_number`` from now on.

        Raises:
            ValueError: The vectors have another dimension than those that are there.
        """
        with writing_errors(self.folder):
            inserted = self._table.insert(documents)
            start = 0
            for piece in vectors:
                stop = start + len(piece)
                self._append_rows(owners[start:stop], passages[start:stop], piece)
                start = stop
        self.facts = replace(
            self._facts,
            count=self._facts.count + inserted,
            next_number=next_number,
        )

    def _append_rows(self, owners: Rows, passages: Passages, vectors: Vectors) -> None:
        facts = self._facts
        dimension = vectors.shape[1]
        if facts.rows and dimension != facts.dimension:
            raise ValueError(
                f"the model's vectors have {dimension} dimensions, those here {facts.dimension}"
            )
        names = (facts.vectors_name, facts.scan_name)
        with self._file(names[0]) as file, self._file(names[1]) as scan_file:
            done = 0
            while done < len(vectors):
                row = facts.rows + done
                number, place = divmod(row, SEGMENT)
                some = slice(done, done + min(SEGMENT - place, len(vectors) - done))
                segment = self._segment(number) if place else Segment.empty()
                # The last block may be a part of one: its copy is made when it is full.
                before = place % BLOCK
                checksums = segment.vector_checksums[place // BLOCK :]
                tail = self._read(file, row - before, (before, dimension), checksums)
                tail = np.concatenate([tail, vectors[some]])
                _write_at(file, (row - before) * dimension * 4, tail)
                whole = tail[: len(tail) // BLOCK * BLOCK]
                codes, scales, errors = round_to_int8(whole)
                _write_at(scan_file, (row - before) * dimension, codes)
                made = [
                    zlib.crc32(as_bytes(tail[n : n + BLOCK])) for n in range(0, len(tail), BLOCK)
                ]
                kept = segment.vector_checksums[: place // BLOCK]
                segment = Segment(
                    np.concatenate([segment.owners, owners[some]]),
                    np.concatenate([segment.passages, passages[some]]),
                    np.concatenate([kept, np.asarray(made, np.uint32)]),
                    np.concatenate([segment.scales, scales]),
                    np.concatenate([segment.errors, errors]),
                    zlib.crc32(as_bytes(codes), segment.scan_checksum),
                )
                self._put_segment(number, segment)
                done = some.stop
        self.owners = np.concatenate([self.owners, owners])
        self.facts = replace(facts, rows=facts.rows + len(vectors), dimension=dimension)

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove documents by their numbers; their vectors stay until the next `clear`."""
        if not numbers:
            return
        with writing_errors(self.folder):
            self._table.delete(numbers)
            gone = np.isin(self.owners, np.asarray(numbers, np.int64))
            self.owners = np.where(gone, GONE, self.owners)
            for number in np.unique(np.flatnonzero(gone) // SEGMENT).tolist():
                segment = self._segment(number)
                its = slice(number * SEGMENT, number * SEGMENT + len(segment.owners))
                self._put_segment(number, replace(segment, owners=self.owners[its]))
        self.facts = replace(self._facts, count=self._facts.count - len(numbers))

    def rewrite(self, number: int, document: Document) -> None:
        """Replace a document whose text stays, and with it its vectors and its words."""
        with writing_errors(self.folder):
            self._table.delete([number])
            self._table.insert([(number, document)])

    def compact(self) -> None:
        """Write new files without the rows of documents that are gone, if these are many."""
        if 4 * self.gone_rows <= len(self.owners):
            return
        before, segments = self._facts, self._segments()
        with writing_errors(self.folder), self._file(before.vectors_name) as file:
            for table in ("segments", "words"):
                self._connection.execute(f"DELETE FROM {table}")
            self.owners, self._words = np.empty(0, np.int64), None
            self.facts = replace(before, rows=0, words_end=0, files=before.files + 1)
            for number, segment in enumerate(segments):
                shape = (len(segment.owners), before.dimension)
                vectors = self._read(file, number * SEGMENT, shape, segment.vector_checksums)
                live = segment.owners != GONE
                self._append_rows(segment.owners[live], segment.passages[live], vectors[live])

    def _read(
        self, file: IO[bytes], row: int, shape: tuple[int, int], checksums: Sequence[int] | Any
    ) -> Vectors:
        """Read vectors from the first row of a block on, and compare them with their checksums."""
        vectors = np.empty(shape, np.float32)
        if not vectors.size:
            return vectors
        nbytes = os.preadv(file.fileno(), [as_bytes(vectors)], row * shape[1] * 4)
        blocks = range(0, len(vectors), BLOCK)
        found = [zlib.crc32(as_bytes(vectors[start : start + BLOCK])) for start in blocks]
        if nbytes != vectors.nbytes or found != list(checksums):
            raise damaged(
                Path(file.name), f"the vectors from row {row} on are not what was written"
            )
        return vectors

    def catch_up_words(self, behind: int) -> None:
        """Let the words' index learn of new documents, if there are more than ``behind``."""
        facts = self._facts
        if facts.next_number - facts.words_end <= behind:
            return
        if self._words is None:
            connection = self._connection
            self._words = Words(lambda: (read_words(connection), facts.words_end))
        try:
            self._words.catch_up(
                facts.next_number,
                lambda start: ((n, each.text) for n, each in self._table.stream(start)),
            )
        except RagDemoError as error:
            log.debug("an index is saved without its words: %s", error)
            return
        self.put_words(self._words.files(), self._words.end)

    def put_words(self, files: Mapping[str, bytes], end: int) -> None:
        """Replace the words' index by its files; it has the documents before number ``end``."""
        with writing_errors(self.folder):
            known = dict(self._connection.execute("SELECT name, checksum FROM words").fetchall())
            for name in known.keys() - files.keys():
                self._connection.execute("DELETE FROM words WHERE name = ?", (name,))
            for name, content in files.items():
                checksum = checksum_of(name, content)
                if known.get(name) != checksum:
                    row = (name, content, checksum)
                    self._connection.execute("INSERT OR REPLACE INTO words VALUES (?, ?, ?)", row)
        self.facts = replace(self._facts, words_end=end)

    def describe(self, *, source: str | None, finished: bool) -> None:
        """Say what is indexed, and whether it all is."""
        self.facts = replace(self._facts, source=source, finished=finished)

    def commit(self, *, more: bool = False) -> None:
        """Make everything since the last commit durable; the words of many documents as well.

        Args:
            more: Begin another transaction afterwards.

        Raises:
            IndexFileError: It cannot be written; the index is what it was.
        """
        self.catch_up_words(_WORDS_BEHIND)
        facts = replace(self._facts, generation=self._facts.generation + 1)
        with writing_errors(self.folder):
            if facts.rows:
                for name in (facts.vectors_name, facts.scan_name):
                    with self._file(name) as file:
                        os.fsync(file.fileno())
            if self._made_files:
                _sync_folder(self.folder)
                self._made_files = False
            value = json.dumps(asdict(facts))
            self._connection.execute("DELETE FROM facts")
            row = (value, zlib.crc32(value.encode()))
            self._connection.execute("INSERT INTO facts VALUES (?, ?)", row)
            self._connection.execute("COMMIT")
            self._is_index, self.facts = True, facts
            self._remove_old_files()
            if more:
                # Others may write in between: what they have changed is read again.
                self._connection.execute("PRAGMA busy_timeout = 60000")
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.execute("PRAGMA busy_timeout = 0")
                if read_facts_of(self.folder, self._connection) != facts:
                    self._begin()
                    self._words = None
                if (self._facts.identity, self._facts.files) != (facts.identity, facts.files):
                    raise IndexFileError(f"another process has replaced the index '{self.folder}'")

    def _remove_old_files(self) -> None:
        names = (self._facts.vectors_name, self._facts.scan_name)
        for path in [*self.folder.glob("vectors-*.f32"), *self.folder.glob("scan-*.i8")]:
            if path.name not in names:
                with contextlib.suppress(OSError):  # The next commit tries again.
                    path.unlink()

    @property
    def count(self) -> int:
        """How many documents there are."""
        return self._facts.count

    @property
    def gone_rows(self) -> int:
        """How many rows belong to no document any more."""
        return int(np.count_nonzero(self.owners == GONE))

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            if self._words is not None:
                self._words.close()
            if not self._is_index:  # While nobody else can write: nothing of this stays behind.
                with contextlib.suppress(IndexFileError):  # What the block raised says more.
                    remove_index(self.folder)
        finally:
            if self._database is not None:
                self._database.close()  # That rolls back what was not committed.
        if not self._is_index:
            with contextlib.suppress(OSError):  # Somebody else has put something into it.
                for folder in self._made_folders:
                    folder.rmdir()

    @property
    def _connection(self) -> sqlite3.Connection:
        assert self._database is not None
        return self._database

    @property
    def _facts(self) -> IndexFacts:
        assert self.facts is not None, "clear() comes first in a folder without an index"
        return self.facts

    def _segment(self, number: int) -> Segment:
        question = f"SELECT {SEGMENT_COLUMNS} WHERE number = ?"
        return Segment.of(self._connection.execute(question, (number,)).fetchone())

    def _put_segment(self, number: int, segment: Segment) -> None:
        question = "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        self._connection.execute(question, (number, *segment.row()))

    def _file(self, name: str) -> IO[bytes]:
        """Open one of the two files; only an index without rows has none yet."""
        is_new = not self._facts.rows and not (self.folder / name).exists()
        self._made_files |= is_new
        return open(self.folder / name, "x+b" if is_new else "r+b", buffering=0)  # noqa: PTH123


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_at(file: IO[bytes], start: int, array: npt.NDArray[Any]) -> None:
    view = as_bytes(array)
    while view:
        written = os.pwrite(file.fileno(), view, start)
        view, start = view[written:], start + written


def open_or_replace(folder: Path) -> IndexWriter:
    """Open an index for changes, and begin anew in place of one that is damaged.

    Raises:
        IndexFileError: See `IndexWriter`.
    """
    try:
        return IndexWriter(folder)
    except DamagedIndexError:
        # Without vectors beside it the file may be anything.
        if not list(folder.glob("vectors-*.f32")):
            raise
        remove_index(folder)
        return IndexWriter(folder)


def remove_index(folder: Path) -> None:
    """Remove the files of an index that is damaged."""
    with writing_errors(folder):
        for pattern in OUR_FILES:
            for path in folder.glob(pattern):
                path.unlink()
