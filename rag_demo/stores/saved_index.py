"""Reading a saved index: a snapshot whose vectors are checked before they are used."""

from __future__ import annotations

import contextlib
import mmap
import os
import sqlite3
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rag_demo.database import Database
from rag_demo.documents.document import Document
from rag_demo.errors import RagDemoError, damaged
from rag_demo.exact_search.rounding import BLOCK
from rag_demo.stores.documents import SCHEMA, DamagedRowError, DocumentTable
from rag_demo.stores.filters import Where
from rag_demo.stores.index_format import (
    DATABASE,
    GONE,
    SEGMENT_COLUMNS,
    Manifest,
    Passages,
    Segment,
    as_bytes,
    open_index,
    read_manifest,
    read_manifest_from,
    readable_uri,
    reading_errors,
)
from rag_demo.vectors import Mask, Rows, Vectors

_ATTEMPTS = 20  # another process may replace the files while they are being opened


def temporary_documents(folder: Path | None = None, saved: Manifest | None = None) -> DocumentTable:
    """Return a table in a temporary file, which goes on after the documents of a saved index.

    SQLite makes the file when the table no longer fits into its cache, and removes its name.

    Args:
        folder: The folder of the saved index, if any.
        saved: Its manifest.

    Raises:
        OSError: The database of the saved index is missing.
        IndexFileError: It is damaged or belongs to another index.
    """

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect("", uri=True, isolation_level=None, check_same_thread=False)
        try:
            for statement in SCHEMA:
                connection.execute(statement)
            if saved is not None and folder is not None:
                uri = readable_uri(folder / saved.documents_name)
                connection.execute("ATTACH ? AS saved", (uri,))
                (identity,) = connection.execute("PRAGMA saved.user_version").fetchone()
                if identity != saved.identity:
                    raise FileNotFoundError(folder / saved.documents_name)
                for table in ("documents", "metadata"):
                    connection.execute(
                        f"CREATE TEMP VIEW {table} AS SELECT * FROM saved.{table}"
                        f" WHERE number < {saved.next_number} UNION ALL SELECT * FROM main.{table}"
                    )
        except BaseException:  # An interrupt must not leave it open.
            connection.close()
            raise
        return connection

    path = folder / saved.documents_name if folder is not None and saved is not None else None
    errors = _temporary_errors if path is None else partial(reading_errors, path)
    return DocumentTable(Database(connect, is_temporary=True, translate_errors=errors))


@contextlib.contextmanager
def _temporary_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        raise RagDemoError(f"a temporary file cannot be written: {error}") from None
    except DamagedRowError as error:
        raise RagDemoError(f"a temporary file is damaged: {error}") from None


class SavedIndex:
    """A snapshot of the index in a folder. Changes by other processes do not affect it.

    Opening takes milliseconds. Vectors are checked when they are first read.

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
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._open()
                return
            except OSError as error:
                path = Path(str(error.filename or error))
                if not isinstance(error, FileNotFoundError):
                    raise damaged(path, error) from None
                if attempt == _ATTEMPTS:
                    raise damaged(folder / path.name, "it is missing") from None

    def _open(self) -> None:
        with contextlib.closing(open_index(self.folder)) as connection:
            manifest = read_manifest_from(self.folder, connection)
            with reading_errors(self.folder / DATABASE):
                rows = connection.execute(f"SELECT {SEGMENT_COLUMNS} ORDER BY number").fetchall()
                segments = [Segment.of(row) for row in rows] or [Segment.empty()]
        self.manifest = manifest
        self.owners: Rows = np.concatenate([each.owners for each in segments])
        self.passages: Passages = np.concatenate([each.passages for each in segments])
        self._checksums = np.concatenate([each.vector_checksums for each in segments])
        is_whole = (
            len(self.owners) == len(self.passages) == manifest.rows
            and len(self._checksums) == -(-manifest.rows // BLOCK)
            and self.owners.min(initial=0) >= GONE
            and self.owners.max(initial=-1) < manifest.next_number
        )
        self.alive: Mask = np.zeros(manifest.next_number, bool)
        if is_whole:
            self.alive[self.owners[self.owners != GONE]] = True
        if not is_whole or np.count_nonzero(self.alive) != manifest.count:
            raise damaged(self.folder / DATABASE, "its segments do not match its manifest")
        self._is_checked = np.zeros(len(self._checksums), bool)
        shape = (manifest.rows, manifest.dimension)
        with contextlib.ExitStack() as stack:
            self._file = _MappedFile(
                self.folder / manifest.vectors_name, 4 * manifest.rows * shape[1]
            )
            stack.callback(self._file.close)
            self.vectors: Vectors = np.frombuffer(self._file.memory, np.float32).reshape(shape)
            self.documents = temporary_documents(self.folder, manifest)
            stack.callback(self.documents.close)
            with self.documents.connection():  # It stays open, even if the file is removed.
                pass
            words = manifest.words(self.folder)
            self.words_index = None if words is None else words.open()
            self.words = words if self.words_index is not None else None
            # The names of another index in the same folder may be the same.
            if read_manifest(self.folder).identity != manifest.identity:
                raise FileNotFoundError(self.folder / DATABASE)
            stack.pop_all()

    def known(self, ids: Sequence[str]) -> tuple[dict[str, int], dict[str, Document]]:
        """Return the numbers of the documents with these ids, and the documents."""
        number_of = self.documents.find(ids, self.alive)
        documents = self.documents.get(list(number_of.values()))
        return number_of, dict(zip(number_of, documents, strict=True))

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
        """Check the databases, all vectors and the full-text index.

        Raises:
            IndexFileError: Something is damaged.
        """
        with (
            contextlib.closing(open_index(self.folder)) as connection,
            reading_errors(self.folder / DATABASE),
        ):
            DocumentTable(Database(lambda: connection)).check()
        with self.documents.connection():
            self.documents.check()  # Also the attached database.
            numbers = [n for n, _ in self.documents.stream() if self.alive[n]]
            if len(numbers) != self.manifest.count:
                raise DamagedRowError("documents are missing")
        self.check_vectors()
        words = self.manifest.words(self.folder)
        if words is not None and self.words is None:
            raise damaged(words.folder, "a checksum is wrong, or it cannot be opened")

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
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:  # zlib releases the GIL.
            list(threads.map(check, np.array_split(blocks, 32)))

    def _compare(self, block: int, vectors: Vectors) -> None:
        if zlib.crc32(as_bytes(vectors)) != self._checksums[block]:
            raise damaged(self._file.path, f"the checksum of row {block * BLOCK} is wrong")
        self._is_checked[block] = True

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
            with path.open("rb") as file:  # Unlike os.open, it refuses a folder.
                self.descriptor = os.dup(file.fileno())
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
