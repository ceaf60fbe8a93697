"""A saved index as it is read: a snapshot, of which everything is checked before it is used."""

from __future__ import annotations

import mmap
import os
import sqlite3
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rag_demo.errors import IndexFileError, damaged
from rag_demo.exact_search.rounding import BLOCK
from rag_demo.store.document_table import DocumentTable
from rag_demo.store.facts import (
    DATABASE,
    GONE,
    SEGMENT_COLUMNS,
    IndexFacts,
    Passages,
    Segment,
    as_bytes,
    open_for_reading,
    open_regular,
    read_facts_of,
    read_words,
    reading_errors,
)
from rag_demo.vectors import Rows, Vectors

__all__ = ["SavedIndex"]

_CHECKED_AT_ONCE_BYTES = 1 << 21  # a database of at most this is checked when it is opened


class SavedIndex:
    """A snapshot of an index in a folder; changes by other processes do not disturb it.

    Opening takes milliseconds. A database of at most 2 MB is checked then; of a larger one, and of
    all vectors, what is read is checked when it is first read.

    Args:
        folder: Where it is.

    Raises:
        IndexFileError: It is missing, damaged, or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        known: list[IndexFacts] = []  # Not this object, which would make a cycle.
        self._known = known

        def connect() -> sqlite3.Connection:
            database = open_for_reading(folder)
            if known and read_facts_of(folder, database) != known[0]:
                raise IndexFileError(f"the index in '{folder}' has changed since; load it again")
            return database

        for _ in range(20):  # Another process may replace the files between two steps.
            self.documents = DocumentTable(connect, lambda: reading_errors(folder))
            try:
                self._open()
                known.append(self.facts)
                return
            except FileNotFoundError as error:
                self.documents.close()
                missing = error
            except OSError as error:
                self.documents.close()
                raise damaged(Path(str(error.filename or folder)), error) from None
            except BaseException:  # An interrupt too: nothing stays open.
                self.documents.close()
                raise
        raise damaged(folder / Path(str(missing.filename)).name, "it is missing")

    def _open(self) -> None:
        with reading_errors(self.folder), self.documents.database() as database:
            facts = read_facts_of(self.folder, database)
            rows = database.execute(f"SELECT {SEGMENT_COLUMNS} ORDER BY number").fetchall()
            segments = [Segment.of(row) for row in rows] or [Segment.empty()]
            (pages,) = database.execute("PRAGMA page_count").fetchone()
            (page_bytes,) = database.execute("PRAGMA page_size").fetchone()
        self.facts = facts
        self.owners: Rows = np.concatenate([each.owners for each in segments])
        self.passages: Passages = np.concatenate([each.passages for each in segments])
        self._checksums = np.concatenate([each.vector_checksums for each in segments])
        self._scales = np.concatenate([each.scales for each in segments])
        self._errors = np.concatenate([each.errors for each in segments])
        self._scan_checksums = [(len(each.scales), each.scan_checksum) for each in segments]
        if len(self.owners) != facts.rows or len(self._checksums) != -(-facts.rows // BLOCK):
            raise damaged(self.folder / DATABASE, "its segments do not fit its rows")
        self._is_checked = np.zeros(len(self._checksums), bool)
        shape, copied = (facts.rows, facts.dimension), len(self._scales) * BLOCK
        self._file = _MappedFile(self.folder / facts.vectors_name, 4 * facts.rows * shape[1])
        self._scan_file = _MappedFile(self.folder / facts.scan_name, copied * shape[1])
        self.vectors: Vectors = np.frombuffer(self._file.memory, np.float32).reshape(shape)
        if pages * page_bytes <= _CHECKED_AT_ONCE_BYTES:
            self.check_documents()

    def see(self, facts: IndexFacts) -> None:
        """Let the database be seen as it is after a change that this process has committed.

        Else SQLite would keep the log of all changes since the snapshot. Rows and documents that
        were there stay where they are; what is described by ``facts`` beyond them is not read.
        """
        with self.documents.database() as database:
            database.execute("ROLLBACK")
            database.execute("BEGIN")
            if read_facts_of(self.folder, database) == facts:
                self._known[:] = [facts]

    def check_documents(self) -> None:
        """Compare every document and the index of metadata with their checksums.

        Raises:
            IndexFileError: Something is not what was written.
        """
        with reading_errors(self.folder):
            count = self.documents.check()
            with self.documents.database() as database:
                numbers = np.fromiter(
                    (number for (number,) in database.execute("SELECT number FROM documents")),
                    np.int64,
                )
        alive = self.owners[self.owners != GONE]
        fits = count == self.facts.count and np.array_equal(np.sort(numbers), np.unique(alive))
        if not fits:
            raise damaged(self.folder / DATABASE, "its vectors do not fit its documents")

    def check_all(self) -> int:
        """Compare everything with its checksums; return how many documents there are.

        Raises:
            IndexFileError: Something is not what was written.
        """
        self.check_documents()
        self.check_vectors()
        self.scan()
        if not self.words()[0] and self.facts.words_end:
            raise damaged(self.folder / DATABASE, "its words are missing")
        return self.facts.count

    def check_length(self) -> None:
        """Raise if the file of vectors was cut off, which would end a process that reads it.

        Raises:
            IndexFileError: It was.
        """
        self._file.check_length()
        self._scan_file.check_length()

    def check_vectors(self) -> None:
        """Compare all vectors with their checksums; 4 GB take a second.

        Raises:
            IndexFileError: Some are not what was written.
        """
        self._check(np.flatnonzero(~self._is_checked))

    def take(self, rows: Rows) -> Vectors:
        """Return the vectors of rows, checked: shape (n, d)."""
        self._file.check_length()
        blocks = np.unique(rows // BLOCK) if len(rows) > 1 else rows // BLOCK
        self._check(blocks[~self._is_checked[blocks]])
        taken: Vectors = self.vectors.take(rows, axis=0)
        return taken

    def read_into(self, start: int, out: Vectors) -> None:
        """Read consecutive vectors, checked, without keeping a page of the file in memory.

        Args:
            start: The first row, of a block.
            out: Shape (n, d); whole blocks, but for the last rows of all.
        """
        nbytes = 4 * self.facts.dimension
        if os.preadv(self._file.descriptor, [as_bytes(out)], start * nbytes) != out.nbytes:
            raise damaged(self._file.path, "it was cut off")
        first, stop = start // BLOCK, -(-(start + len(out)) // BLOCK)
        for block in (np.flatnonzero(~self._is_checked[first:stop]) + first).tolist():
            self._compare(block, out[block * BLOCK - start : (block + 1) * BLOCK - start])

    def take_unmapped(self, rows: Rows) -> Vectors:
        """Do what `take` does, and keep no page of the file in memory."""
        result = np.empty((len(rows), self.facts.dimension), np.float32)
        blocks = rows // BLOCK
        for block in np.unique(blocks).tolist():
            start = block * BLOCK
            its = np.flatnonzero(blocks == block)
            count = min(BLOCK, self.facts.rows - start)
            vectors = np.empty((count, self.facts.dimension), np.float32)
            self.read_into(start, vectors)
            result[its] = vectors[rows[its] - start]
        return result

    def _check(self, blocks: Rows) -> None:
        def check(some: Rows) -> None:
            for block in some.tolist():
                self._compare(block, self.vectors[block * BLOCK : (block + 1) * BLOCK])

        if len(blocks) < 1 << 10:
            check(blocks)
            return
        self._file.check_length()
        with ThreadPoolExecutor(2) as threads:  # zlib lets go of the interpreter's lock.
            list(threads.map(check, np.array_split(blocks, 8)))

    def _compare(self, block: int, vectors: Vectors) -> None:
        if zlib.crc32(as_bytes(vectors)) != self._checksums[block]:
            raise damaged(self._file.path, f"the checksum of row {block * BLOCK} is wrong")
        self._is_checked[block] = True

    def scan(self) -> tuple[npt.NDArray[np.int8], Vectors, Vectors]:
        """Return the int8 copies of the first vectors, whole blocks, with scales and errors.

        Raises:
            IndexFileError: They are not what was written.
        """
        rows, dimension = len(self._scales) * BLOCK, self.facts.dimension
        file = self._scan_file
        file.check_length()
        if not rows:
            return np.empty((0, dimension), np.int8), self._scales, self._errors
        codes = np.frombuffer(file.memory, np.int8).reshape(rows, dimension)
        starts = np.cumsum([0, *(blocks * BLOCK for blocks, _ in self._scan_checksums)]).tolist()

        def check(number: int) -> None:
            found = zlib.crc32(as_bytes(codes[starts[number] : starts[number + 1]]))
            if found != self._scan_checksums[number][1]:
                raise damaged(file.path, f"the checksum of row {starts[number]} is wrong")

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(check, range(len(self._scan_checksums))))
        return codes, self._scales, self._errors

    def words(self) -> tuple[dict[str, bytes], int]:
        """Return the files of the words' index, and from which number on it lacks documents."""
        with self.documents.database() as database:
            # Of the database as it is now, which `see` may have moved on.
            return read_words(database), read_facts_of(self.folder, database).words_end

    def close(self) -> None:
        """Close all files; arrays that somebody still has stay readable."""
        self.documents.close()
        self.vectors = np.empty((0, 0), np.float32)
        self._file.close()
        self._scan_file.close()


class _MappedFile:
    """The first bytes of a file, mapped; a change of the memory changes no file."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self._nbytes = path, nbytes
        self.memory: Any = b""
        self.descriptor = -1
        self._close: Callable[[], object] = lambda: None
        if nbytes:  # Else there may be no file.
            self.descriptor = open_regular(path)
            finalizer = weakref.finalize(self, os.close, self.descriptor)
            finalizer.atexit = False
            self._close = finalizer
            self.check_length()
            self.memory = mmap.mmap(self.descriptor, nbytes, access=mmap.ACCESS_COPY)

    def check_length(self) -> None:
        size = os.fstat(self.descriptor).st_size if self._nbytes else 0
        if size < self._nbytes:
            raise damaged(self.path, f"it has {size} bytes, not {self._nbytes}")

    def close(self) -> None:
        """Close the file; its memory is unmapped when nobody refers to it any more."""
        self.memory, self.descriptor = b"", -1
        self._close()
