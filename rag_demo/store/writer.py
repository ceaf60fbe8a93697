"""Writing a saved index: one writer at a time, in transactions."""

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

from rag_demo.database import Database
from rag_demo.documents.document import Document
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import DamagedIndexError, IndexFileError, RagDemoError, damaged
from rag_demo.exact_search.rounding import BLOCK
from rag_demo.store.document_table import DocumentTable
from rag_demo.store.index_format import (
    DATABASE,
    GONE,
    INDEX_FILES,
    SEGMENT,
    SEGMENT_COLUMNS,
    TABLES,
    Manifest,
    Passages,
    Segment,
    as_bytes,
    checksum_of,
    is_busy,
    read_manifest_from,
    read_text_index,
    refuse_foreign_folder,
    writing_errors,
)
from rag_demo.store.text_index import TextIndex
from rag_demo.vectors import Rows, Vectors

_MOST_BEHIND = 1 << 13
"""Documents that a commit may leave out of the full-text index; a reader adds them itself."""

log = logging.getLogger("rag_demo")


class IndexWriter:
    """The only writer of an index. Use it with ``with``; without `commit`, changes are lost.

    Readers are not disturbed. If nothing is committed, a folder that was made is removed.

    Args:
        folder: The folder of the index. It is created if it is missing.

    Attributes:
        manifest: What is going to be committed; None in a folder without an index.
        owners: The number of the document that each row belongs to.

    Raises:
        IndexFileError: The folder holds something else, cannot be written, or another process
            is writing into it.
    """

    def __init__(self, folder: Path) -> None:
        refuse_foreign_folder(folder)
        self.folder = folder
        self.manifest: Manifest | None = None
        self._made_folders = [each for each in (folder, *folder.parents) if not each.exists()]
        # Remove nothing before it is certain that this is the only writer and there is no index.
        self._is_index = True
        self._made_files = False
        self._text_index: TextIndex | None = None
        self._table: DocumentTable | None = None
        try:
            with writing_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                self._connection = connection = self._connect()
                # Not a method of this writer: the cycle would keep the lock until a collection.
                self._table = DocumentTable(Database(lambda: connection))
                self._begin()
                self._is_index = self.manifest is not None
        except BaseException:  # After an interrupt too, nothing else closes this.
            self.__exit__()
            raise

    def _connect(self) -> sqlite3.Connection:
        path = self.folder / DATABASE
        is_new = not path.exists()
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("BEGIN IMMEDIATE")
            if not path.exists():  # Another writer has failed and removed its files.
                raise sqlite3.OperationalError("the database is locked by another process")
        except BaseException as error:
            connection.close()
            if isinstance(error, sqlite3.OperationalError):
                self._is_index = not is_new or is_busy(error)  # The disk may be full.
            raise
        return connection

    def _begin(self) -> None:
        """Read the state of the index; in a new database, create the tables."""
        if not self._connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            for statement in TABLES:
                self._connection.execute(statement)
        if self._connection.execute("SELECT 1 FROM manifest").fetchone():
            self.manifest = read_manifest_from(self.folder, self._connection)
        owners = [segment.owners for segment in self._segments()]
        self.owners: Rows = np.concatenate([np.empty(0, np.int64), *owners])

    def _segments(self) -> list[Segment]:
        query = f"SELECT {SEGMENT_COLUMNS} ORDER BY number"
        return [Segment.of(row) for row in self._connection.execute(query)]

    @property
    def documents(self) -> DocumentTable:
        """The documents as they will be committed."""
        assert self._table is not None
        return self._table

    def clear(self, model: ModelIdentity, *, source: str | None = None) -> None:
        """Remove everything, and begin new files; `commit` removes the old ones."""
        before = self.manifest or Manifest(model)
        with writing_errors(self.folder):
            for table in ("documents", "metadata", "segments", "text_index"):
                self._connection.execute(f"DELETE FROM {table}")
        self.owners = np.empty(0, np.int64)
        self._text_index = None
        self.manifest = Manifest(
            model,
            source,
            generation=before.generation,
            file_number=before.file_number + 1,
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
        """Append documents and rows of vectors.

        Args:
            documents: Documents with numbers from ``manifest.next_number`` on.
            owners: The number of the document of each row, or `GONE`: shape (n,).
            passages: Start and stop of the passage of each row; 0 and 0 for the whole document:
                shape (n, 2).
            vectors: The vectors in pieces of the shape (m, d), float32.
            next_number: The new ``manifest.next_number``.

        Raises:
            ValueError: The vectors have another dimension than those of the index.
        """
        with writing_errors(self.folder):
            inserted = self.documents.insert(documents)
            start = 0
            for piece in vectors:
                stop = start + len(piece)
                self._append_rows(owners[start:stop], passages[start:stop], piece)
                start = stop
        count = self._manifest.count + inserted
        self.manifest = replace(self._manifest, count=count, next_number=next_number)

    def _append_rows(self, owners: Rows, passages: Passages, vectors: Vectors) -> None:
        manifest = self._manifest
        dimension = vectors.shape[1]
        if manifest.rows and dimension != manifest.dimension:
            raise ValueError(
                f"the model's vectors have {dimension} dimensions, "
                f"but the index has {manifest.dimension}; use the model that made it"
            )
        with self._open_file(manifest.vectors_name) as file:
            done = 0
            while done < len(vectors):
                row = manifest.rows + done
                number, place = divmod(row, SEGMENT)
                some = slice(done, done + min(SEGMENT - place, len(vectors) - done))
                segment = self._segment(number) if place else Segment.empty()
                # The last block may be incomplete; its checksum changes.
                before = place % BLOCK
                checksums = segment.vector_checksums[place // BLOCK :]
                tail = self._read(file, row - before, (before, dimension), checksums)
                tail = np.concatenate([tail, vectors[some]])
                _write_at(file, (row - before) * dimension * 4, tail)
                added = np.asarray(_block_checksums(tail), np.uint32)
                segment = Segment(
                    np.concatenate([segment.owners, owners[some]]),
                    np.concatenate([segment.passages, passages[some]]),
                    np.concatenate([segment.vector_checksums[: place // BLOCK], added]),
                )
                self._put_segment(number, segment)
                done = some.stop
        self.owners = np.concatenate([self.owners, owners])
        self.manifest = replace(manifest, rows=manifest.rows + len(vectors), dimension=dimension)

    def remove(self, numbers: Sequence[int]) -> None:
        """Remove documents by their numbers; their vectors stay in the file until `compact`."""
        if not numbers:
            return
        with writing_errors(self.folder):
            self.documents.delete(numbers)
            gone = np.isin(self.owners, np.asarray(numbers, np.int64))
            self.owners = np.where(gone, GONE, self.owners)
            for number in np.unique(np.flatnonzero(gone) // SEGMENT).tolist():
                segment = self._segment(number)
                rows = slice(number * SEGMENT, number * SEGMENT + len(segment.owners))
                self._put_segment(number, replace(segment, owners=self.owners[rows]))
        self.manifest = replace(self._manifest, count=self._manifest.count - len(numbers))

    def rewrite(self, number: int, document: Document) -> None:
        """Replace a document without changing its text, so that its vectors stay valid."""
        with writing_errors(self.folder):
            self.documents.delete([number])
            self.documents.insert([(number, document)])

    def compact(self) -> None:
        """Write new files without the rows of deleted documents, if these are a quarter of all."""
        if 4 * self.gone_rows <= len(self.owners):
            return
        before, segments = self._manifest, self._segments()
        with writing_errors(self.folder), self._open_file(before.vectors_name) as file:
            for table in ("segments", "text_index"):
                self._connection.execute(f"DELETE FROM {table}")
            self.owners, self._text_index = np.empty(0, np.int64), None
            self.manifest = replace(before, rows=0, text_end=0, file_number=before.file_number + 1)
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
        if nbytes != vectors.nbytes or _block_checksums(vectors) != list(checksums):
            raise damaged(
                Path(file.name), f"the vectors from row {row} on differ from what was written"
            )
        return vectors

    def catch_up_text(self, most_behind: int) -> None:
        """Add new documents to the full-text index, if it lacks more than ``most_behind``."""
        manifest, connection = self._manifest, self._connection
        if manifest.next_number - manifest.text_end <= most_behind:
            return
        if self._text_index is None:
            self._text_index = TextIndex(lambda: (read_text_index(connection), manifest.text_end))
        try:
            self._text_index.catch_up(
                manifest.next_number,
                lambda start: ((n, each.text) for n, each in self.documents.stream(start)),
            )
        except RagDemoError as error:
            log.debug("an index is saved without its full-text index: %s", error)
            return
        self._put_text_index(self._text_index.files(), self._text_index.end)

    def _put_text_index(self, files: Mapping[str, bytes], end: int) -> None:
        """Replace the full-text index; it has the documents with numbers below ``end``."""
        with writing_errors(self.folder):
            saved = self._connection.execute("SELECT name, checksum FROM text_index").fetchall()
            known = dict(saved)
            for name in known.keys() - files.keys():
                self._connection.execute("DELETE FROM text_index WHERE name = ?", (name,))
            for name, content in files.items():
                checksum = checksum_of(name, content)
                if known.get(name) != checksum:
                    row = (name, content, checksum)
                    query = "INSERT OR REPLACE INTO text_index VALUES (?, ?, ?)"
                    self._connection.execute(query, row)
        self.manifest = replace(self._manifest, text_end=end)

    def describe(self, *, source: str | None, finished: bool) -> None:
        """Record what is indexed, and whether all of it is."""
        self.manifest = replace(self._manifest, source=source, finished=finished)

    def commit(self, *, more: bool = False) -> None:
        """Make all changes since the last commit durable.

        Args:
            more: Begin another transaction afterwards.

        Raises:
            IndexFileError: The index cannot be written. It is what it was before.
        """
        self.catch_up_text(_MOST_BEHIND)
        manifest = replace(self._manifest, generation=self._manifest.generation + 1)
        with writing_errors(self.folder):
            if manifest.rows:
                with self._open_file(manifest.vectors_name) as file:
                    os.fsync(file.fileno())
            if self._made_files:
                _sync_folder(self.folder)
                self._made_files = False
            value = json.dumps(asdict(manifest))
            self._connection.execute("DELETE FROM manifest")
            row = (value, checksum_of(value))
            self._connection.execute("INSERT INTO manifest VALUES (?, ?)", row)
            self._connection.execute("COMMIT")
            self._is_index, self.manifest = True, manifest
            self._remove_old_files()
            if more:
                self._begin_again(manifest)

    def _begin_again(self, manifest: Manifest) -> None:
        """Begin another transaction; read again what others have written in between."""
        self._connection.execute("PRAGMA busy_timeout = 60000")
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("PRAGMA busy_timeout = 0")
        if read_manifest_from(self.folder, self._connection) == manifest:
            return
        self._begin()
        self._text_index = None
        found = self._manifest
        if (found.identity, found.file_number) != (manifest.identity, manifest.file_number):
            raise IndexFileError(f"another process has replaced the index '{self.folder}'")

    def _remove_old_files(self) -> None:
        for path in [*self.folder.glob("vectors-*.f32"), *self.folder.glob("scan-*.i8")]:
            if path.name != self._manifest.vectors_name:
                with contextlib.suppress(OSError):  # The next commit tries again.
                    path.unlink()

    @property
    def count(self) -> int:
        """How many documents there are."""
        return self._manifest.count

    @property
    def gone_rows(self) -> int:
        """How many rows belong to deleted documents."""
        return int(np.count_nonzero(self.owners == GONE))

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            if self._text_index is not None:
                self._text_index.close()
            if not self._is_index:  # While the lock is held: leave no file of a failed attempt.
                with contextlib.suppress(IndexFileError):  # The block's own error says more.
                    _remove_index(self.folder)
        finally:
            if hasattr(self, "_connection"):
                self._connection.close()  # This rolls back what was not committed.
        if not self._is_index:
            with contextlib.suppress(OSError):  # Another program has put something into it.
                for folder in self._made_folders:
                    folder.rmdir()

    @property
    def _manifest(self) -> Manifest:
        assert self.manifest is not None, "call clear() first in a folder without an index"
        return self.manifest

    def _segment(self, number: int) -> Segment:
        query = f"SELECT {SEGMENT_COLUMNS} WHERE number = ?"
        return Segment.of(self._connection.execute(query, (number,)).fetchone())

    def _put_segment(self, number: int, segment: Segment) -> None:
        query = "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?)"
        self._connection.execute(query, (number, *segment.row()))

    def _open_file(self, name: str) -> IO[bytes]:
        """Open a file of rows; an index without rows has none yet."""
        is_new = not self._manifest.rows and not (self.folder / name).exists()
        self._made_files |= is_new
        return open(self.folder / name, "x+b" if is_new else "r+b", buffering=0)  # noqa: PTH123


def _block_checksums(vectors: Vectors) -> list[int]:
    starts = range(0, len(vectors), BLOCK)
    return [zlib.crc32(as_bytes(vectors[start : start + BLOCK])) for start in starts]


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
    """Open an index for changes; replace a damaged one by an empty one.

    Raises:
        IndexFileError: See `IndexWriter`.
    """
    try:
        return IndexWriter(folder)
    except DamagedIndexError:
        # Without vectors beside it, the file may be another program's.
        if not list(folder.glob("vectors-*.f32")):
            raise
        _remove_index(folder)
        return IndexWriter(folder)


def _remove_index(folder: Path) -> None:
    with writing_errors(folder):
        for pattern in INDEX_FILES:
            for path in folder.glob(pattern):
                path.unlink()
