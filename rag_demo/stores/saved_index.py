"""Reading a saved index: a snapshot whose vectors are checked before they are used."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sqlite3
import weakref
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rag_demo.database import Database
from rag_demo.documents.document import Document
from rag_demo.errors import RagDemoError, damaged
from rag_demo.stores.documents import SCHEMA, DamagedRowError, DocumentTable
from rag_demo.stores.filters import Where
from rag_demo.stores.index_format import (
    GONE,
    Manifest,
    Passages,
    as_bytes,
    database_name,
    readable_uri,
    reading,
    reading_errors,
)
from rag_demo.vectors import Mask, Rows, Vectors


def temporary_documents(path: Path | None = None, saved: Manifest | None = None) -> DocumentTable:
    """Return a table in a temporary file, which goes on after the documents of a saved index.

    SQLite makes the file when the table no longer fits into its cache, and removes its name.

    Args:
        path: The database of the saved index, if any.
        saved: Its manifest.

    Raises:
        OSError: The database of the saved index is missing.
        IndexFileError: It is damaged.
    """

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect("", uri=True, isolation_level=None, check_same_thread=False)
        try:
            for statement in SCHEMA:
                connection.execute(statement)
            if path is not None and saved is not None:
                connection.execute("ATTACH ? AS saved", (readable_uri(path),))
                (identity,) = connection.execute("PRAGMA saved.user_version").fetchone()
                if identity != saved.identity:
                    raise FileNotFoundError(errno.ENOENT, "it was replaced", str(path))
                for table in ("documents", "metadata"):
                    connection.execute(
                        f"CREATE TEMP VIEW {table} AS SELECT * FROM saved.{table}"
                        f" WHERE number < {saved.next_number} UNION ALL SELECT * FROM main.{table}"
                    )
        except BaseException:  # An interrupt must not leave it open.
            connection.close()
            raise
        return connection

    errors = _temporary_errors if path is None else partial(reading_errors, path)
    return DocumentTable(Database(connect, translate_errors=errors))


@contextlib.contextmanager
def _temporary_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise RagDemoError(f"a temporary file cannot be written: {error}") from None
    except DamagedRowError as error:
        raise RagDemoError(f"a temporary file is damaged: {error}") from None


def alive_of(owners: Rows, count: int) -> Mask:
    """Return whether the document of each number exists, which has vectors: shape (count,)."""
    alive = np.zeros(count, bool)
    alive[owners[owners != GONE]] = True
    return alive


def read_pieces(database: sqlite3.Connection, manifest: Manifest) -> Any:
    """Read which document each vector belongs to.

    Returns:
        The owners, the passages, whether the document of each number exists, where each piece of
        the file begins, and its checksum.

    Raises:
        ValueError: They do not match the manifest.
    """
    rows = database.execute("SELECT owners, passages, row, checksum FROM pieces ORDER BY row")
    owners, passages, starts, checksums = list(zip(*rows, strict=True)) or ((), (), (), ())
    owner: Rows = np.frombuffer(bytearray().join(owners), np.int64)
    passage: Passages = np.frombuffer(bytearray().join(passages), np.int32).reshape(-1, 2)
    expected = np.cumsum([0, *(len(each) // 8 for each in owners)])
    is_whole = (
        len(owner) == len(passage) == manifest.rows
        and owner.min(initial=GONE) >= GONE
        and owner.max(initial=GONE) < manifest.next_number
        and np.array_equal(expected, [*starts, manifest.rows])
    )
    alive = alive_of(owner, manifest.next_number) if is_whole else None
    if alive is None or np.count_nonzero(alive) != manifest.count:
        raise ValueError("its pieces do not match its manifest")
    return owner, passage, alive, expected, checksums


class SavedIndex:
    """A snapshot of the index in a folder. Changes by other processes do not affect it.

    Opening takes milliseconds. Vectors are checked when they are first used.

    Args:
        folder: The folder of the index.

    Attributes:
        manifest: The manifest.
        owners: The document of each row, or `GONE`: shape (n,).
        passages: Start and stop of the passage of each row: shape (n, 2).
        alive: Whether the document of each number exists.
        documents: The documents.
        words: The full-text index; None if it is missing or damaged.
        words_index: It, open.

    Raises:
        IndexFileError: The index is missing, damaged, or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        reading(folder, self._open)

    def _open(self, database: sqlite3.Connection, manifest: Manifest) -> None:
        self.path = self.folder / database_name(manifest.file_number)
        self.manifest = manifest
        with reading_errors(self.path):
            pieces = read_pieces(database, manifest)
        self.owners, self.passages, self.alive, self._starts, self._checksums = pieces
        shape = (manifest.rows, manifest.dimension)
        self._is_checked, self._nbytes = False, 4 * shape[0] * shape[1]
        self._vectors_path = self.folder / manifest.vectors_name
        with contextlib.ExitStack() as stack:
            memory: Any = b""
            self._descriptor = -1
            self._close: Any = lambda: None
            if self._nbytes:  # An index without vectors has no file.
                with self._vectors_path.open("rb") as file:  # Unlike os.open, it refuses a folder.
                    self._descriptor = os.dup(file.fileno())
                self._close = weakref.finalize(self, os.close, self._descriptor)
                self._close.atexit = False
                stack.callback(self._close)
                self.check_length()
                # Mapped privately: changes of the memory do not reach the file.
                memory = mmap.mmap(self._descriptor, self._nbytes, access=mmap.ACCESS_COPY)
            self._mapped: Vectors = np.frombuffer(memory, np.float32).reshape(shape)
            self.documents = temporary_documents(self.path, manifest)
            stack.callback(self.documents.close)
            with self.documents.connection():  # It stays open, even if the file is removed.
                pass
            words = manifest.words(self.folder)
            self.words_index = None if words is None else words.open()
            self.words = words if self.words_index is not None else None
            stack.pop_all()

    def known(self, ids: Sequence[str]) -> tuple[dict[str, int], dict[str, Document]]:
        """Return the numbers of the documents with these ids, and the documents."""
        return self.documents.known(ids, self.alive)

    def kinds(self) -> dict[str, set[int]]:
        """Return the keys of metadata, each with the kinds of its values."""
        return self.documents.kinds()

    def size(self) -> tuple[int, int]:
        """Return the number of vectors, and the bytes of all files."""
        files = (each for each in self.folder.rglob("*") if each.is_file())
        return self.manifest.rows, sum(each.stat().st_size for each in files)

    def matching(self, where: Where | None) -> list[int]:
        """Return the numbers of the documents that match a filter; None for all."""
        alive = self.alive if where is None else self.documents.matching(where, self.alive)
        return list(map(int, np.flatnonzero(alive)))

    def at(self, numbers: Sequence[int]) -> list[Document]:
        """Return documents by their numbers."""
        return self.documents.get(numbers)

    def files_in(self, prefix: str) -> list[str]:
        """Return the files whose names begin with a prefix that ends with a separator."""
        return self.documents.files_in(prefix)

    def verify(self) -> None:
        """Check the database, all vectors and the full-text index.

        Raises:
            IndexFileError: Something is damaged.
        """
        self.check()
        with self.documents.connection():
            numbers = [n for n, _ in self.documents.stream() if self.alive[n]]
            if len(numbers) != self.manifest.count:
                raise DamagedRowError("documents are missing")
        words = self.manifest.words(self.folder)
        if words is not None and self.words is None:
            raise damaged(words.folder, "its checksum is wrong, or it cannot be opened")

    def check(self) -> None:
        """Check the structure of the database, and all vectors."""
        with self.documents.connection():
            self.documents.check()  # Also the attached database.
        self.check_vectors()

    def check_length(self) -> None:
        """Check the length of the file; reading mapped memory beyond the end is a SIGBUS.

        Raises:
            IndexFileError: The file was cut off.
        """
        size = os.fstat(self._descriptor).st_size if self._nbytes else 0
        if size < self._nbytes:
            raise damaged(self._vectors_path, f"it has {size} bytes instead of {self._nbytes}")

    @property
    def vectors(self) -> Vectors:
        """The vectors, checked: shape (n, d)."""
        self.check_vectors()
        return self._mapped

    def check_vectors(self) -> None:
        """Compare all vectors with their checksums, once; 4 GB take some seconds.

        Raises:
            IndexFileError: Some differ from what was written.
        """
        if self._is_checked:
            return

        def check(piece: int) -> None:
            start, stop = self._starts[piece : piece + 2].tolist()
            vectors = np.empty((stop - start, self.manifest.dimension), np.float32)
            self._read_into(start, vectors)
            if zlib.crc32(as_bytes(vectors)) != self._checksums[piece]:
                raise damaged(self._vectors_path, f"the checksum of row {start} is wrong")

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:  # zlib releases the GIL.
            list(threads.map(check, range(len(self._checksums))))
        self._is_checked = True

    def take(self, rows: Rows) -> Vectors:
        """Return a copy of the vectors of rows, checked: shape (n, d)."""
        self.check_length()
        taken: Vectors = self.vectors.take(rows, axis=0)
        return taken

    def read_into(self, start: int, out: Vectors) -> None:
        """Read consecutive vectors, checked, without keeping the file's pages in memory.

        Args:
            start: The first row.
            out: Shape (n, d).
        """
        self.check_vectors()
        self._read_into(start, out)

    def _read_into(self, start: int, out: Vectors) -> None:
        place = start * 4 * self.manifest.dimension
        if os.preadv(self._descriptor, [as_bytes(out)], place) != out.nbytes:
            raise damaged(self._vectors_path, "it was cut off")

    def take_unmapped(self, rows: Rows) -> Vectors:
        """Do the same as `take`, without keeping the file's pages in memory."""
        result = np.empty((len(rows), self.manifest.dimension), np.float32)
        for place, row in enumerate(rows.tolist()):
            self.read_into(row, result[place : place + 1])
        return result

    def close(self) -> None:
        """Close all files. Arrays that are still referenced stay readable."""
        self.documents.close()
        self._mapped = np.empty((0, 0), np.float32)
        self._descriptor = -1
        self._close()
