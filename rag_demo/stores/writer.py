"""Writing a saved index: one writer at a time, in transactions."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rag_demo.database import Database
from rag_demo.documents.document import Document
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import (
    DamagedIndexError,
    IndexVersionError,
    RagDemoError,
    WriterBusyError,
    damaged,
)
from rag_demo.exact_search.rounding import BLOCK
from rag_demo.stores.documents import SCHEMA, DocumentTable
from rag_demo.stores.filters import Where
from rag_demo.stores.index_format import (
    DATABASE,
    GONE,
    SEGMENT,
    SEGMENT_COLUMNS,
    TABLES,
    Manifest,
    Passages,
    Segment,
    as_bytes,
    is_part,
    read_manifest_from,
    reading_errors,
    refuse_foreign_folder,
    use_rollback_journal,
    writing_errors,
)
from rag_demo.stores.store import EmbeddedBatch, places_of_older
from rag_demo.stores.words import WordsFolder, add_texts
from rag_demo.vectors import Mask, Rows, Vectors, renumbered

_FEWEST_UNUSED = 1 << 12
_MOST_BEHIND = 1 << 13
"""Documents that a commit may leave out of the full-text index; a reader adds them itself."""

log = logging.getLogger("rag_demo")


class IndexWriter:
    """The only writer of an index. Use it with ``with``; without `commit`, changes are lost.

    Readers are not disturbed. If nothing is committed, a folder that was made is removed.

    Args:
        folder: The folder of the index. It is created if it is missing.
        start_over: Whether to replace a damaged index by an empty one.

    Attributes:
        manifest: What is going to be committed; None in a folder without an index.
        owners: The number of the document that each row belongs to, or `GONE`.

    Raises:
        IndexFileError: The folder holds something else, cannot be written, or another process
            is writing into it; or the index is damaged.
    """

    def __init__(self, folder: Path, *, start_over: bool = False) -> None:
        refuse_foreign_folder(folder)
        self.folder = folder
        self.manifest: Manifest | None = None
        self.owners: Rows = np.empty(0, np.int64)
        self._committed: Manifest | None = None
        self._made_folders = [each for each in (folder, *folder.parents) if not each.exists()]
        self._is_read = False  # Remove nothing before it is known what is committed.
        self._made_files = False
        self._lock = -1
        self._connection: sqlite3.Connection | None = None
        self._documents: DocumentTable | None = None
        try:
            with writing_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                if not os.access(folder, os.W_OK):
                    raise PermissionError(errno.EACCES, "it is read-only")
                # First the attribute, then the lock: an interrupt between them leaves no lock.
                self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                _lock(self._lock, folder)
                has_parts = any(is_part(path.name) for path in folder.iterdir())
                try:
                    self._read(is_new=not has_parts)
                except (DamagedIndexError, IndexVersionError, sqlite3.DatabaseError) as error:
                    # An OperationalError is about the disk or a reader.
                    if not start_over or isinstance(error, sqlite3.OperationalError):
                        raise
                    self._unlink_database()
                    self._read(is_new=True)
                self._remove_unnamed()
        except BaseException:  # After an interrupt too, nothing else closes this.
            self.__exit__()
            raise

    def _read(self, *, is_new: bool) -> None:
        """Read the state of the index, and begin a transaction.

        Args:
            is_new: Whether to create the database if it is missing or empty.
        """
        path = self.folder / DATABASE
        self._is_read = not path.exists()
        if not is_new and self._is_read:
            self._is_read = False  # Remove nothing.
            raise damaged(path, "it is missing")
        connection = sqlite3.connect(path, timeout=5, isolation_level=None, check_same_thread=False)
        self._connection = connection
        connection.execute("PRAGMA synchronous = FULL")
        use_rollback_journal(connection)
        connection.execute("BEGIN IMMEDIATE")
        if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            if not is_new:
                raise damaged(path, "it is empty")
            self._is_read = True
            for statement in TABLES:
                connection.execute(statement)
            # Committed before there are other files: else a lost database looks like a new one.
            connection.execute("COMMIT")
            connection.execute("BEGIN IMMEDIATE")
        self.manifest = self._committed = None
        with reading_errors(self.folder / DATABASE):
            has_manifest = connection.execute("SELECT 1 FROM manifest").fetchone()
            rows = connection.execute(f"SELECT {SEGMENT_COLUMNS} ORDER BY number")
            owners = [Segment.of(row).owners for row in rows]
            self.owners = np.concatenate([np.empty(0, np.int64), *owners])
        if has_manifest:
            manifest = read_manifest_from(self.folder, connection)
            if (
                len(self.owners) != manifest.rows
                or self.owners.min(initial=GONE) < GONE
                or self.owners.max(initial=GONE) >= manifest.next_number
            ):
                raise damaged(path, "its segments do not match its manifest")
            self.manifest = self._committed = manifest
            self._open_documents()
            # What a killed writer has left.
            self.documents.delete_from(self.manifest.next_number)
        self._is_read = True

    def _open_documents(self) -> None:
        """Open the database of documents, which may be new, and begin a transaction."""
        self._close_documents()
        manifest = self._manifest
        path = self.folder / manifest.documents_name
        is_new = manifest.next_number == 0 and not path.exists()
        if not is_new and not path.is_file():
            raise damaged(path, "it is missing")
        connection = sqlite3.connect(
            path, timeout=60, isolation_level=None, check_same_thread=False
        )
        # Not a method of this writer: the cycle would keep the lock until a collection.
        self._documents = DocumentTable(Database(lambda: connection))
        self._made_files |= is_new
        with self._documents.connection():
            connection.execute("PRAGMA synchronous = FULL")
            use_rollback_journal(connection)
            connection.execute("BEGIN IMMEDIATE")
            if is_new:
                for statement in SCHEMA:
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {manifest.identity}")
            elif connection.execute("PRAGMA user_version").fetchone() != (manifest.identity,):
                raise damaged(path, "it belongs to another index")

    def _close_documents(self) -> None:
        if self._documents is not None:
            self._documents.close()  # This rolls back what was not committed.
            self._documents = None

    @property
    def documents(self) -> DocumentTable:
        """The documents as they will be committed; `alive` says which of them count."""
        assert self._documents is not None
        return self._documents

    @property
    def alive(self) -> Mask:
        """Whether the document of each number exists."""
        alive = np.zeros(self._manifest.next_number, bool)
        alive[self.owners[self.owners != GONE]] = True
        return alive

    def find(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the numbers of the existing documents with these ids."""
        with writing_errors(self.folder):
            return self.documents.find(ids, self.alive)

    def clear(self, model: ModelIdentity, *, source: str | None = None, language: str = "") -> None:
        """Remove everything, and begin new files; the old ones are removed after `commit`."""
        before = self.manifest or Manifest(model)
        identity = 1 + int.from_bytes(os.urandom(4), "big") % (2**31 - 2)
        number = before.file_number + 1
        with writing_errors(self.folder):
            self._open_connection.execute("DELETE FROM segments")
            self.owners = np.empty(0, np.int64)
            self.manifest = Manifest(
                model,
                source,
                file_number=number,
                identity=identity,
                language=language or before.language,
            )
            self._open_documents()

    def use_language(self, language: str) -> None:
        """Set the language of stems; the full-text index is made again if it has another."""
        manifest = self._manifest
        if manifest.language != language:
            self.manifest = replace(manifest, language=language, words_end=0, words_files={})

    def append(
        self,
        documents: Iterable[tuple[int, Document]],
        owners: Rows,
        passages: Passages,
        vectors: Iterable[Vectors],
        next_number: int,
    ) -> None:
        """Append documents and rows of vectors, and change the owners of present rows.

        Args:
            documents: Documents with numbers from ``manifest.next_number`` on.
            owners: The number of the document of each row, also of present rows, or `GONE`:
                shape (rows + n,).
            passages: Start and stop of the passage of each new row; 0 and 0 for the whole
                document: shape (n, 2).
            vectors: The new vectors in pieces of the shape (m, d), float32.
            next_number: The new ``manifest.next_number``.

        Raises:
            ValueError: The vectors have another dimension than those of the index.
        """
        with writing_errors(self.folder):
            self.documents.insert(documents)
            rows = len(self.owners)
            self._set_owners(owners[:rows])
            start = 0
            for piece in vectors:
                stop = start + len(piece)
                self._append_rows(owners[rows + start : rows + stop], passages[start:stop], piece)
                start = stop
        self.manifest = replace(self._manifest, next_number=next_number)

    def _append_rows(self, owners: Rows, passages: Passages, vectors: Vectors) -> None:
        manifest = self._manifest
        dimension = vectors.shape[1]
        if manifest.rows and dimension != manifest.dimension:
            raise ValueError(
                f"the model's vectors have {dimension} dimensions, "
                f"but the index has {manifest.dimension}; use the model that made it"
            )
        with self._open_vectors() as file:
            done = 0
            while done < len(vectors):
                row = manifest.rows + done
                number, place = divmod(row, SEGMENT)
                some = slice(done, done + min(SEGMENT - place, len(vectors) - done))
                segment = self._segment(number) if place else Segment.empty()
                # The last block may be incomplete; its checksum changes.
                before = place % BLOCK
                checksums = segment.vector_checksums[place // BLOCK :]
                tail = self._read_vectors(file, row - before, (before, dimension), checksums)
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

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove documents by their numbers; their data stay in the files until `compact`."""
        gone = dict.fromkeys(numbers, GONE)
        with writing_errors(self.folder):
            self._set_owners(renumbered(self.owners, gone, self._manifest.next_number))

    def upsert(self, batch: EmbeddedBatch) -> range:
        """Add documents and return their numbers; see `rag_demo.stores.store.Store.upsert`."""
        older = self.find([document.id for document in batch.documents])
        first = self._manifest.next_number
        taken = places_of_older(batch, older, self.documents.get)
        changes = {number: first + at if at >= 0 else GONE for number, at in taken.items()}
        owners = renumbered(self.owners, changes, first)
        numbers = range(first, first + len(batch.documents))
        self.append(
            zip(numbers, batch.documents, strict=True),
            np.concatenate([owners, batch.owners + first]),
            batch.spans,
            [batch.vectors] if len(batch.vectors) else [],
            numbers.stop,
        )
        return numbers

    def _set_owners(self, owners: Rows) -> None:
        for number in np.unique(np.flatnonzero(owners != self.owners) // SEGMENT).tolist():
            rows = slice(number * SEGMENT, (number + 1) * SEGMENT)
            self._put_segment(number, replace(self._segment(number), owners=owners[rows]))
        self.owners = owners

    def compact(self) -> None:
        """Write new files without deleted documents, if these take much space."""
        if not self.wastes_space:
            return
        before, documents, owners, alive = self._manifest, self.documents, self.owners, self.alive
        self._documents = None  # It stays open until its documents are copied.
        try:
            with writing_errors(self.folder), self._open_vectors() as file:
                rows = self._open_connection.execute(f"SELECT {SEGMENT_COLUMNS} ORDER BY number")
                segments = list(map(Segment.of, rows))
                self.clear(before.model)
                places = np.cumsum(alive) - 1  # the new numbers
                live = (each for each in documents.stream() if alive[each[0]])
                count = self.documents.insert((int(places[n]), each) for n, each in live)
                for number, segment in enumerate(segments):
                    shape = (len(segment.owners), before.dimension)
                    vectors = self._read_vectors(
                        file, number * SEGMENT, shape, segment.vector_checksums
                    )
                    kept = segment.owners != GONE
                    numbers = places[segment.owners[kept]]
                    self._append_rows(numbers, segment.passages[kept], vectors[kept])
                assert len(self.owners) == np.count_nonzero(owners != GONE)
        finally:
            documents.close()
        self.manifest = replace(
            self._manifest, source=before.source, finished=before.finished, next_number=count
        )

    def _read_vectors(
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

    def check(self) -> None:
        """Check the database of documents, and compare all vectors with their checksums.

        Raises:
            DamagedIndexError: Something is damaged.
        """
        dimension = self._manifest.dimension
        with writing_errors(self.folder), contextlib.ExitStack() as stack:
            self.documents.check()
            file = stack.enter_context(self._open_vectors()) if len(self.owners) else None
            for number in range(-(-len(self.owners) // SEGMENT)):
                segment = self._segment(number)
                shape = (len(segment.owners), dimension)
                assert file is not None
                self._read_vectors(file, number * SEGMENT, shape, segment.vector_checksums)

    def catch_up_words(self, most_behind: int = 0, known: WordsFolder | None = None) -> None:
        """Add new documents to the full-text index, if it lacks more than ``most_behind``.

        Args:
            most_behind: How many documents may be missing.
            known: A folder with more documents of this numbering, from which to begin.
        """
        manifest = self._manifest
        if known is None or known.end <= manifest.words_end:
            if manifest.next_number - manifest.words_end <= most_behind:
                return
            known = manifest.words(self.folder)
        number = manifest.words_number + 1
        new = self.folder / replace(manifest, words_number=number).words_name
        try:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
            if known is None or not known.copy_into(new):
                known = WordsFolder(new, 0, {})
            alive = self.alive
            texts = ((n, each.text) for n, each in self.documents.stream(known.end) if alive[n])
            add_texts(new, texts, manifest.language)
            for path in new.iterdir():
                shutil.copymode(self.folder / DATABASE, path)
        except (RagDemoError, ValueError, OSError) as error:
            log.debug("an index is saved without its full-text index: %s", error)
            return
        self.manifest = replace(
            manifest,
            words_number=number,
            words_end=manifest.next_number,
            words_files=WordsFolder.of(new, 0, known.files).files,
        )

    def known(self, ids: Sequence[str]) -> tuple[dict[str, int], dict[str, Document]]:
        """Return the numbers of the documents with these ids, and the documents."""
        number_of = self.find(ids)
        documents = self.documents.get(list(number_of.values()))
        return number_of, dict(zip(number_of, documents, strict=True))

    def matching(self, where: Where) -> list[int]:
        """Return the numbers of the documents that match a filter."""
        return list(map(int, np.flatnonzero(self.documents.matching(where, self.alive))))

    def others(self, files: Sequence[str] | None) -> list[int]:
        """Return the numbers of the documents of files; None for all documents."""
        if files is None:
            return list(map(int, np.flatnonzero(self.alive)))
        return [number for number in self.documents.of_files(files) if self.alive[number]]

    def keep(self, source: str | None, *, finished: bool) -> None:
        """Commit all changes, and go on unless the run is finished."""
        if finished:
            self.compact()
        self.describe(source=source, finished=finished)
        if finished:
            self.catch_up_words()
        self.prepare()
        self.commit(more=not finished)

    def describe(self, *, source: str | None, finished: bool) -> None:
        """Record what is indexed, and whether all of it is."""
        self.manifest = replace(self._manifest, source=source, finished=finished)

    def prepare(self) -> Manifest:
        """Write all but the manifest, and return what `commit` will commit.

        Raises:
            IndexFileError: The index cannot be written.
        """
        self.catch_up_words(_MOST_BEHIND)
        manifest = replace(self._manifest, commit=os.urandom(8).hex(), count=self.count)
        with writing_errors(self.folder):
            with self.documents.connection() as connection:
                connection.execute("COMMIT")
            if manifest.rows:
                with self._open_vectors() as file:
                    os.fsync(file.fileno())
            if self._made_files:
                _sync_folder(self.folder)
                self._made_files = False
            self._open_connection.execute("DELETE FROM manifest")
            row = (json.dumps(asdict(manifest)),)
            self._open_connection.execute("INSERT INTO manifest VALUES (?)", row)
        self.manifest = manifest
        return manifest

    def commit(self, *, more: bool = False) -> None:
        """Make all changes since the last commit durable; call `prepare` before.

        Args:
            more: Begin another transaction afterwards.

        Raises:
            IndexFileError: The index cannot be written. It is what it was before.
        """
        manifest = self._manifest
        with writing_errors(self.folder):
            self._open_connection.execute("COMMIT")
            self._committed = manifest
            if more:
                self._open_connection.execute("BEGIN IMMEDIATE")
                with self.documents.connection() as documents:
                    documents.execute("BEGIN IMMEDIATE")

    @property
    def count(self) -> int:
        """How many documents there are."""
        return int(np.count_nonzero(self.alive))

    @property
    def wastes_space(self) -> bool:
        """Whether deleted documents have a quarter of the rows, or most of the numbers."""
        gone_rows = int(np.count_nonzero(self.owners == GONE))
        unused = self._manifest.next_number - self.count
        return 4 * gone_rows > len(self.owners) or 4 * unused > max(
            3 * self._manifest.next_number, _FEWEST_UNUSED
        )

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._close_documents()
            if self._connection is not None:
                self._connection.close()  # This rolls back what was not committed.
            if self._is_read and self._lock >= 0:
                with contextlib.suppress(OSError):  # The next writer tries again.
                    self._remove_unnamed()
                    if self._committed is None:
                        self._unlink_database()
                        for folder in self._made_folders:
                            folder.rmdir()
        finally:
            lock, self._lock = self._lock, -1
            if lock >= 0:
                os.close(lock)

    def _unnamed(self) -> Iterator[Path]:
        committed = self._committed
        for path in self.folder.iterdir():
            if is_part(path.name) and (committed is None or not committed.names(path.name)):
                yield path

    def _remove_unnamed(self) -> None:
        """Remove what the committed state does not name, while the lock is held."""
        for path in list(self._unnamed()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _unlink_database(self) -> None:
        """Remove ``index.sqlite``."""
        if self._connection is not None:
            self._connection.close()
        for suffix in ("", "-journal", "-wal", "-shm"):
            (self.folder / f"{DATABASE}{suffix}").unlink(missing_ok=True)

    @property
    def _open_connection(self) -> sqlite3.Connection:
        assert self._connection is not None
        return self._connection

    @property
    def _manifest(self) -> Manifest:
        assert self.manifest is not None, "call clear() first in a folder without an index"
        return self.manifest

    def _segment(self, number: int) -> Segment:
        query = f"SELECT {SEGMENT_COLUMNS} WHERE number = ?"
        return Segment.of(self._open_connection.execute(query, (number,)).fetchone())

    def _put_segment(self, number: int, segment: Segment) -> None:
        query = "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?)"
        self._open_connection.execute(query, (number, *segment.row()))

    def _open_vectors(self) -> IO[bytes]:
        """Open the file of vectors; an index without rows has none yet."""
        path = self.folder / self._manifest.vectors_name
        is_new = not self._manifest.rows and not path.exists()
        self._made_files |= is_new
        return open(path, "x+b" if is_new else "r+b", buffering=0)  # noqa: PTH123


def _lock(descriptor: int, folder: Path) -> None:
    """Lock an open folder until it is closed. A killed process loses the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WriterBusyError(
            f"another process is writing into '{folder}'; try again when it has finished"
        ) from None


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
