"""Reading a saved index: a snapshot whose data are checked before they are used."""

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

from rag_demo.database import Database
from rag_demo.errors import IndexFileError, damaged
from rag_demo.exact_search.rounding import BLOCK
from rag_demo.store.document_table import DocumentTable
from rag_demo.store.index_format import (
    DATABASE,
    GONE,
    SEGMENT_COLUMNS,
    Manifest,
    Passages,
    Segment,
    as_bytes,
    open_for_reading,
    open_regular,
    read_manifest_from,
    read_text_index,
    reading_errors,
)
from rag_demo.vectors import Rows, Vectors

_SMALL_BYTES = 1 << 21  # a database of at most this size is checked when it is opened
_ATTEMPTS = 20  # another process may replace the files while they are being opened


class SavedIndex:
    """A snapshot of the index in a folder. Changes by other processes do not affect it.

    Opening takes milliseconds. A database of at most 2 MB is checked when it is opened. A larger
    one, and all vectors, are checked when they are first read.

    Args:
        folder: The folder of the index.

    Raises:
        IndexFileError: The index is missing, damaged, or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        known: list[Manifest] = []  # A reference to this object would make a cycle.
        self._known = known

        def connect() -> sqlite3.Connection:
            connection = open_for_reading(folder)
            if known and read_manifest_from(folder, connection) != known[0]:
                connection.close()
                raise IndexFileError(
                    f"the index in '{folder}' has changed since it was loaded; load it again"
                )
            return connection

        database = Database(connect, translate_errors=lambda: reading_errors(folder))
        self.documents = DocumentTable(database)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._open()
                known.append(self.manifest)
                return
            except OSError as error:
                self.documents.close()
                path = Path(str(error.filename or folder))
                if not isinstance(error, FileNotFoundError):
                    raise damaged(path, error) from None
                if attempt == _ATTEMPTS:
                    raise damaged(folder / path.name, "it is missing") from None
            except BaseException:  # An interrupt must not leave it open.
                self.documents.close()
                raise

    def _open(self) -> None:
        with self.documents.connection() as connection:
            manifest = read_manifest_from(self.folder, connection)
            rows = connection.execute(f"SELECT {SEGMENT_COLUMNS} ORDER BY number").fetchall()
            segments = [Segment.of(row) for row in rows] or [Segment.empty()]
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
        self.manifest = manifest
        self.owners: Rows = np.concatenate([each.owners for each in segments])
        self.passages: Passages = np.concatenate([each.passages for each in segments])
        self._checksums = np.concatenate([each.vector_checksums for each in segments])
        if len(self.owners) != manifest.rows or len(self._checksums) != -(-manifest.rows // BLOCK):
            raise damaged(self.folder / DATABASE, "its segments do not match its rows")
        self._is_checked = np.zeros(len(self._checksums), bool)
        shape = (manifest.rows, manifest.dimension)
        self._file = _MappedFile(self.folder / manifest.vectors_name, 4 * manifest.rows * shape[1])
        self.vectors: Vectors = np.frombuffer(self._file.memory, np.float32).reshape(shape)
        if pages * page_bytes <= _SMALL_BYTES:
            self.check_documents()

    def advance(self, manifest: Manifest) -> None:
        """See the database as it is after a change that this process has committed.

        Otherwise SQLite would keep the log of all changes since the snapshot. The rows and
        documents of the snapshot stay where they are; new ones are not read.
        """
        with self.documents.connection() as connection:
            connection.execute("ROLLBACK")
            connection.execute("BEGIN")
            if read_manifest_from(self.folder, connection) == manifest:
                self._known[:] = [manifest]

    def check_documents(self) -> None:
        """Compare every document and the index of metadata with their checksums.

        Raises:
            IndexFileError: Something differs from what was written.
        """
        with self.documents.connection() as connection:
            count = self.documents.check()
            rows = connection.execute("SELECT number FROM documents ORDER BY number").fetchall()
        alive = np.unique(self.owners[self.owners != GONE])
        if count != self.manifest.count or [number for (number,) in rows] != alive.tolist():
            raise damaged(self.folder / DATABASE, "its vectors do not match its documents")

    def check_all(self) -> int:
        """Compare everything with its checksums, and return how many documents there are.

        Raises:
            IndexFileError: Something differs from what was written.
        """
        self.check_documents()
        self.check_vectors()
        if not self.text_index()[0] and self.manifest.text_end:
            raise damaged(self.folder / DATABASE, "its full-text index is missing")
        return self.manifest.count

    def check_length(self) -> None:
        """Check the length of the file; reading mapped memory beyond the end is a SIGBUS.

        Raises:
            IndexFileError: The file was cut off.
        """
        self._file.check_length()

    def check_vectors(self) -> None:
        """Compare all vectors with their checksums; 4 GB take a second.

        Raises:
            IndexFileError: Some differ from what was written.
        """
        self._check(np.flatnonzero(~self._is_checked))

    def take(self, rows: Rows) -> Vectors:
        """Return a copy of the vectors of rows, checked: shape (n, d)."""
        self._file.check_length()
        blocks = np.unique(rows // BLOCK) if len(rows) > 1 else rows // BLOCK
        self._check(blocks[~self._is_checked[blocks]])
        taken: Vectors = self.vectors.take(rows, axis=0)
        return taken

    def read_into(self, start: int, out: Vectors) -> None:
        """Read consecutive vectors, checked, without keeping the file's pages in memory.

        Args:
            start: The first row of a block.
            out: Shape (n, d). Only the last block of the file may be incomplete.
        """
        nbytes = 4 * self.manifest.dimension
        if os.preadv(self._file.descriptor, [as_bytes(out)], start * nbytes) != out.nbytes:
            raise damaged(self._file.path, "it was cut off")
        first, stop = start // BLOCK, -(-(start + len(out)) // BLOCK)
        for block in (np.flatnonzero(~self._is_checked[first:stop]) + first).tolist():
            self._compare(block, out[block * BLOCK - start : (block + 1) * BLOCK - start])

    def take_unmapped(self, rows: Rows) -> Vectors:
        """Do the same as `take`, without keeping the file's pages in memory."""
        result = np.empty((len(rows), self.manifest.dimension), np.float32)
        blocks = rows // BLOCK
        for block in np.unique(blocks).tolist():
            start, places = block * BLOCK, np.flatnonzero(blocks == block)
            count = min(BLOCK, self.manifest.rows - start)
            vectors = np.empty((count, self.manifest.dimension), np.float32)
            self.read_into(start, vectors)
            result[places] = vectors[rows[places] - start]
        return result

    def _check(self, blocks: Rows) -> None:
        def check(some: Rows) -> None:
            for block in some.tolist():
                self._compare(block, self.vectors[block * BLOCK : (block + 1) * BLOCK])

        if len(blocks) < 1 << 10:
            check(blocks)
            return
        self._file.check_length()
        with ThreadPoolExecutor(2) as threads:  # zlib releases the GIL.
            list(threads.map(check, np.array_split(blocks, 8)))

    def _compare(self, block: int, vectors: Vectors) -> None:
        if zlib.crc32(as_bytes(vectors)) != self._checksums[block]:
            raise damaged(self._file.path, f"the checksum of row {block * BLOCK} is wrong")
        self._is_checked[block] = True

    def text_index(self) -> tuple[dict[str, bytes], int]:
        """Return the files of the full-text index, and the first document number it lacks."""
        with self.documents.connection() as connection:
            # `advance` may have moved the database on, so the manifest is read again.
            return read_text_index(connection), read_manifest_from(self.folder, connection).text_end

    def close(self) -> None:
        """Close all files. Arrays that are still referenced stay readable."""
        self.documents.close()
        self.vectors = np.empty((0, 0), np.float32)
        self._file.close()


class _MappedFile:
    """The first bytes of a file, mapped privately: changes of the memory do not reach the file."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self._nbytes = path, nbytes
        self.memory: Any = b""
        self.descriptor = -1
        self._close: Callable[[], object] = lambda: None
        if nbytes:  # An index without vectors has no file.
            self.descriptor = open_regular(path)
            finalizer = weakref.finalize(self, os.close, self.descriptor)
            finalizer.atexit = False
            self._close = finalizer
            self.check_length()
            self.memory = mmap.mmap(self.descriptor, nbytes, access=mmap.ACCESS_COPY)

    def check_length(self) -> None:
        size = os.fstat(self.descriptor).st_size if self._nbytes else 0
        if size < self._nbytes:
            raise damaged(self.path, f"it has {size} bytes instead of {self._nbytes}")

    def close(self) -> None:
        """Close the file. The memory is unmapped when nothing refers to it any more."""
        self.memory, self.descriptor = b"", -1
        self._close()
