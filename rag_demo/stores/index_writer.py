"""The one writer of a saved index; see `rag_demo.stores.index_folder` for its files."""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from rag_demo.documents.document import Document
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import (
    DamagedIndexError,
    IndexFileError,
    IndexVersionError,
    MissingIndexError,
    RagDemoError,
)
from rag_demo.stores.documents import SCHEMA, DocumentTable
from rag_demo.stores.filters import Where
from rag_demo.stores.index_folder import (
    GONE,
    PIECE,
    TABLES,
    Manifest,
    Passages,
    SavedIndex,
    alive_of,
    as_bytes,
    busy,
    database_name,
    databases_of,
    index_errors,
    is_part,
    read_pieces,
    reading,
    temporary_documents,
    wastes_space,
    writing_errors,
)
from rag_demo.stores.store import EmbeddedBatch, batches_of, owners_of_older
from rag_demo.stores.words import WordsFolder, checksum_of, index_words
from rag_demo.vectors import Mask, Rows, Vectors, check_dimension, renumbered

MOST_BEHIND = 1 << 13
"""Documents that a commit may leave out of the full-text index; a reader adds them itself."""

log = logging.getLogger("rag_demo")


class Known(NamedTuple):
    """What a program remembers of a state that it has loaded or saved.

    Attributes:
        origin: The same object for all states that share their numbers of documents.
        owners: The owner of each row.
        next_number: The number of the next document.
    """

    origin: object
    owners: Rows
    next_number: int


class IndexWriter:
    """The only writer of an index. Use it with ``with``; without `commit`, changes are lost.

    Readers are not disturbed. If nothing is committed, a folder that was made is removed.

    Args:
        folder: The folder of the index. It is created if it is missing.
        start_over: Whether the first commit may replace a damaged index.
        known: What the caller knows of committed states, by the ``commit`` of their manifests.

    Attributes:
        manifest: What is going to be committed; None in a folder without an index.
        documents: The documents as they will be committed; `alive` says which of them count.
        owners: The number of the document that each row belongs to, or `GONE`.
        next_commit: The ``commit`` of the next manifest.

    Raises:
        IndexFileError: The folder holds something else, cannot be written, or another process
            is writing into it; or the index is damaged.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start_over: bool = False,
        known: Mapping[str, Known] = MappingProxyType({}),
    ) -> None:
        self.folder, self._known = folder, known
        self.manifest: Manifest | None = None
        self.owners: Rows = np.empty(0, np.int64)
        self._alive: Mask | None = None  # until it is needed
        self._starts: list[int] = []  # of the pieces
        self._committed: Manifest | None = None
        self.next_commit = os.urandom(8).hex()
        self._made_folders = [each for each in (folder, *folder.parents) if not each.exists()]
        self._is_known = False  # Remove nothing before it is known what is committed.
        self._lock = -1
        self.documents = temporary_documents()  # until a database is opened
        try:
            with writing_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                if not os.access(folder, os.W_OK):
                    raise PermissionError(errno.EACCES, "it is read-only")
                # First the attribute, then the lock: an interrupt between them leaves no lock.
                self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    # A killed process loses the lock.
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise busy(folder) from None
                names = [path.name for path in folder.iterdir()]
                foreign = [name for name in names if not is_part(name)]
                if foreign and not databases_of(names):
                    raise IndexFileError(
                        f"'{folder}' holds {foreign[0]!r} and is not an index; "
                        "name a new or an empty folder"
                    )
                try:
                    self._read()
                except (DamagedIndexError, IndexVersionError):
                    if not start_over:
                        raise
                else:
                    self._is_known = True
                    self._remove_unnamed()
        except BaseException:  # After an interrupt too, nothing else closes this.
            self.__exit__()
            raise

    def _read(self) -> None:
        """Read the committed state, if any, and begin a transaction."""

        def read(database: sqlite3.Connection, manifest: Manifest) -> None:
            self._open(manifest.file_number)
            known = self._known.get(manifest.commit)
            self._set_owners(known.owners if known else read_pieces(database, manifest)[0])
            self._starts = [row for (row,) in database.execute("SELECT row FROM pieces")]
            self.manifest = self._committed = manifest

        with contextlib.suppress(MissingIndexError):
            reading(self.folder, read)

    def _open(self, number: int, identity: int = 0) -> None:
        """Open a database, and begin a transaction; with an identity make its tables."""
        self.documents.close()  # This rolls back what was not committed.
        path = self.folder / database_name(number)
        # Not methods of this writer: the cycle would keep the lock until a collection.
        connect = partial(
            sqlite3.connect, path, timeout=5, isolation_level=None, check_same_thread=False
        )
        errors = partial(index_errors, path, "written")
        self.documents = DocumentTable(connect, translate_errors=errors)
        with self.documents.use() as connection:
            connection.execute("PRAGMA synchronous = FULL")
            # Readers may be unable to write what SQLite's log (WAL) needs, or use another machine.
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("PRAGMA cache_spill = OFF")  # Readers wait for a commit only.
            connection.execute("BEGIN IMMEDIATE")
            if identity:
                for statement in (*TABLES, *SCHEMA, f"PRAGMA user_version = {identity}"):
                    connection.execute(statement)
                connection.execute("COMMIT")
                connection.execute("BEGIN IMMEDIATE")

    @property
    def alive(self) -> Mask:
        """Whether the document of each number exists."""
        if self._alive is None:
            self._alive = alive_of(self.owners, self._manifest.next_number)
        return self._alive

    def _set_owners(self, owners: Rows) -> None:
        self.owners, self._alive = owners, None

    def clear(self, model: ModelIdentity, language: str = "") -> None:
        """Remove everything, and begin new files; the old ones are removed after `commit`."""
        before = self.manifest or Manifest(model)
        identity = 1 + int.from_bytes(os.urandom(4), "big") % (2**31 - 2)
        with writing_errors(self.folder):
            number = 1 + max(databases_of(path.name for path in self.folder.iterdir()), default=0)
            self._open(number, identity)
        self._set_owners(np.empty(0, np.int64))
        self._starts = []
        language = language or before.language
        self.manifest = Manifest(model, file_number=number, identity=identity, language=language)

    def use_language(self, language: str) -> None:
        """Set the language of stems; the full-text index is made again if it has another."""
        if self._manifest.language != language:
            self.manifest = replace(self._manifest, language=language, words_end=0)

    def append(
        self,
        documents: Iterable[tuple[int, Document]],
        owners: Rows,
        passages: Passages,
        take: Callable[[Rows], Vectors],
        next_number: int,
    ) -> None:
        """Append documents and rows of vectors, and change the owners of present rows.

        Args:
            documents: Documents with numbers from ``manifest.next_number`` on.
            owners: The number of the document of each row, also of present rows, or `GONE`:
                shape (rows + n,).
            passages: Start and stop of the passage of each new row; 0 and 0 for the whole
                document: shape (n, 2).
            take: Returns the vectors of new rows: shape (m, d), float32.
            next_number: The new ``manifest.next_number``.

        Raises:
            ValueError: The vectors have another dimension than those of the index.
        """
        present = len(self.owners)
        with writing_errors(self.folder):
            self.documents.insert(documents)
            self._change_owners(owners[:present])
            for start in range(present, len(owners), PIECE):
                rows = np.arange(start, min(start + PIECE, len(owners)))
                self._append_piece(owners[rows], passages[rows - present], take(rows))
        self._set_owners(owners)
        self.manifest = replace(self._manifest, next_number=next_number)

    def _append_piece(self, owners: Rows, passages: Passages, vectors: Vectors) -> None:
        manifest, dimension = self._manifest, vectors.shape[1]
        if manifest.rows:
            check_dimension(vectors, manifest.dimension)
        # A file without rows may have some of a writer that was killed.
        flags = os.O_WRONLY | (0 if manifest.rows else os.O_CREAT)
        with os.fdopen(os.open(self.folder / manifest.vectors_name, flags, 0o666), "wb") as file:
            file.seek(manifest.rows * dimension * 4)
            file.write(as_bytes(vectors))
        row = owners.tobytes(), np.ascontiguousarray(passages, np.int32).tobytes()
        checksum = zlib.crc32(as_bytes(vectors))
        with self.documents.use() as connection:
            query = "INSERT INTO pieces VALUES (?, ?, ?, ?)"
            connection.execute(query, (manifest.rows, *row, checksum))
        self._starts.append(manifest.rows)
        self.manifest = replace(manifest, rows=manifest.rows + len(vectors), dimension=dimension)

    def _change_owners(self, owners: Rows) -> None:
        rows = np.flatnonzero(owners != self.owners)
        changed = np.searchsorted(self._starts, rows, "right") - 1
        ends = [*self._starts[1:], len(owners)]
        with self.documents.use() as connection:
            for piece in dict.fromkeys(changed.tolist()):
                start = self._starts[piece]
                some = owners[start : ends[piece]].tobytes()
                connection.execute("UPDATE pieces SET owners = ? WHERE row = ?", (some, start))
        self._set_owners(owners)

    def upsert(self, batch: EmbeddedBatch) -> None:
        """Add documents; see `rag_demo.stores.store.Store.upsert`."""
        changes = owners_of_older(batch, self.documents, self.alive)
        first = self._manifest.next_number
        present = len(self.owners)
        self.append(
            enumerate(batch.documents, first),
            np.concatenate([renumbered(self.owners, changes, first), batch.owners + first]),
            batch.spans,
            lambda rows: batch.vectors[rows - present],
            first + len(batch.documents),
        )

    def delete(self, ids: Sequence[str]) -> int:
        """Remove documents, and return how many; their data stay in the files for some time."""
        gone = dict.fromkeys(self.documents.find(ids, self.alive).values(), GONE)
        self._change_owners(renumbered(self.owners, gone, self._manifest.next_number))
        return len(gone)

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """Return a document for each id; None for an unknown one."""
        return self.documents.known(ids, self.alive)

    def matching(self, where: Where) -> list[str]:
        """Return the ids of the documents that match a filter."""
        return self.documents.page(self.documents.matching(where, self.alive))

    def of_files(self, files: Sequence[str] | None) -> list[str]:
        """Return the ids of the documents of files; None for all documents."""
        if files is None:
            return self.documents.ids(np.flatnonzero(self.alive))
        return self.documents.of_files(files, self.alive)

    def check(self) -> None:
        """Check the committed database and vectors.

        Raises:
            DamagedIndexError: Something is damaged.
        """
        with contextlib.closing(SavedIndex(self.folder)) as saved:
            saved.check()

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
        changed = replace(manifest, words_number=manifest.words_number + 1)
        new = self.folder / changed.words_name
        try:
            index_words(new, known, self.documents, self.alive, manifest.language)
            for path in new.iterdir():
                shutil.copymode(self.folder / database_name(manifest.file_number), path)
            checksum = checksum_of(new)
        except (ValueError, OSError) as error:
            log.debug("an index is saved without its full-text index: %s", error)
            return
        self.manifest = replace(changed, words_end=manifest.next_number, words_checksum=checksum)

    def keep(self, source: str | None, *, finished: bool) -> None:
        """Commit all changes, and go on; make the files again if they waste space."""
        starts_over = finished and wastes_space(self.owners == GONE, ~self.alive)
        if finished and not starts_over:
            self.catch_up_words()
        self.commit(source, finished=finished)
        if not starts_over:
            return
        try:
            with contextlib.closing(SavedIndex(self.folder)) as old:
                self.clear(old.manifest.model)
                parts = old.documents, old.owners, old.passages, old.alive, old.take
                for batch in batches_of(*parts, old.manifest.model):
                    self.upsert(batch)
                self.catch_up_words()
                self.commit(source)
        except DamagedIndexError:
            raise
        except RagDemoError as error:
            log.warning("the change is saved, but deleted texts still take space: %s", error)
            self._read()

    def commit(
        self,
        source: str | None = None,
        *,
        finished: bool = True,
        words: WordsFolder | None = None,
    ) -> None:
        """Make all changes since the last commit durable.

        Args:
            source: What is indexed.
            finished: Whether all of it is.
            words: A full-text index of this numbering, from which to begin.

        Raises:
            IndexFileError: The index cannot be written. It is what it was before.
        """
        self.catch_up_words(MOST_BEHIND, words)
        commit, before = self.next_commit, self._committed
        manifest = replace(
            self._manifest, source=source, finished=finished, commit=commit, count=self.count
        )
        vectors = manifest.vectors_name
        with writing_errors(self.folder), self.documents.use() as connection:
            is_new = before is None or not (before.rows and before.names(vectors))
            for name in [vectors] * bool(manifest.rows) + ["."] * is_new:
                descriptor = os.open(self.folder / name, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            connection.execute("DELETE FROM manifest")
            row = (json.dumps(asdict(manifest)),)
            connection.execute("INSERT INTO manifest VALUES (?)", row)
            self._is_known = False  # After an interrupt it is unknown what is committed.
            connection.execute("COMMIT")
            self.manifest = self._committed = manifest
            self._is_known, self.next_commit = True, os.urandom(8).hex()
            connection.execute("BEGIN IMMEDIATE")

    @property
    def count(self) -> int:
        """How many documents there are."""
        return int(np.count_nonzero(self.alive))

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.documents.close()
            if self._is_known and self._lock >= 0:
                with contextlib.suppress(OSError):  # The next writer tries again.
                    self._remove_unnamed()
                    if self._committed is None:
                        for folder in self._made_folders:
                            folder.rmdir()
        finally:
            lock, self._lock = self._lock, -1
            if lock >= 0:
                os.close(lock)

    def _remove_unnamed(self) -> None:
        """Remove what the committed state does not name, while the lock is held."""
        committed = self._committed
        for path in list(self.folder.iterdir()):
            if not is_part(path.name) or (committed is not None and committed.names(path.name)):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    @property
    def _manifest(self) -> Manifest:
        assert self.manifest is not None, "call clear() first in a folder without an index"
        return self.manifest
