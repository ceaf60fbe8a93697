"""The one writer of a saved index; see `rag_demo.stores.index_folder` for its files."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from rag_demo.database import index_errors
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import (
    DamagedIndexError,
    IndexFileError,
    IndexVersionError,
    MissingIndexError,
    WriterBusyError,
)
from rag_demo.reading.document import Document
from rag_demo.stores.contents import Contents
from rag_demo.stores.documents import SCHEMA, DocumentTable
from rag_demo.stores.filters import Where
from rag_demo.stores.index_folder import (
    PIECE,
    TABLES,
    Manifest,
    SavedIndex,
    as_bytes,
    database_name,
    databases_of,
    is_part,
    read_contents,
    read_manifest,
    temporary_documents,
    writing_errors,
)
from rag_demo.stores.store import EmbeddedBatch
from rag_demo.stores.words import WordsFolder, checksum_of, copy_words, index_words
from rag_demo.vectors import Rows, Vectors, check_dimension

MOST_BEHIND = 1 << 13
"""Documents that a commit may leave out of the full-text index; a reader adds them itself."""

log = logging.getLogger("rag_demo")


@contextlib.contextmanager
def open_writer(folder: Path, *, start_over: bool = False) -> Iterator[IndexWriter]:
    """Lock the folder of an index, and yield its writer. What was not committed is lost.

    Readers are not disturbed. After an error of a change, leave the block.

    Args:
        folder: The folder of the index. It is created if it is missing.
        start_over: Whether the first commit may replace a damaged index.

    Raises:
        IndexFileError: The folder holds something else, cannot be written, or another process
            is writing into it; or the index is damaged.
    """
    with writing_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # A killed process loses it.
        except BlockingIOError:
            raise WriterBusyError(
                f"another process is writing into '{folder}'; try again when it has finished"
            ) from None
        names = [path.name for path in folder.iterdir()]
        foreign = [name for name in names if not is_part(name)]
        if foreign and not databases_of(names):
            raise IndexFileError(
                f"'{folder}' holds {foreign[0]!r} and is not an index; "
                "name a new or an empty folder"
            )
        writer = IndexWriter(folder)
        try:
            ignored = (DamagedIndexError, IndexVersionError) if start_over else ()
            with contextlib.suppress(*ignored):
                writer.open()
            yield writer
        finally:
            writer.close()
    finally:
        os.close(descriptor)


class IndexWriter:
    """The writer of an index whose folder is locked; see `open_writer`.

    Attributes:
        manifest: What is going to be committed; None in a folder without an index.
        documents: All documents, by number.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest | None = None
        self.documents = temporary_documents()  # until a database is opened
        self._contents: Contents | None = None  # until it is needed
        self._checksums: list[int] = []  # of the pieces

    def open(self) -> None:
        """Read the committed state, if any, and begin a transaction."""
        with contextlib.suppress(MissingIndexError):
            manifest = read_manifest(self.folder)
            self._open(manifest.file_number)
            with self.documents.use() as database:
                query = "SELECT checksum FROM pieces ORDER BY piece"
                self._checksums = [checksum for (checksum,) in database.execute(query)]
            self.manifest = manifest

    def _open(self, number: int, schema: Sequence[str] = ()) -> None:
        """Open a database, make its tables, and begin a transaction."""
        self.documents.close()  # This rolls back what was not committed.
        path = self.folder / database_name(number)
        # Not a method of this writer: the cycle would keep it until a collection.
        connect = partial(
            sqlite3.connect, path, timeout=5, isolation_level=None, check_same_thread=False
        )
        self.documents = DocumentTable(connect, translate_errors=partial(index_errors, path))
        with self.documents.use() as connection:
            connection.execute("PRAGMA synchronous = FULL")
            # Readers may be unable to write what SQLite's log (WAL) needs, or use another machine.
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("PRAGMA cache_spill = OFF")  # Readers wait for a commit only.
            with connection:
                for statement in schema:
                    connection.execute(statement)
            connection.execute("BEGIN IMMEDIATE")

    @property
    def contents(self) -> Contents:
        """The documents as they are going to be committed."""
        if self._contents is None:
            with self.documents.use() as database:
                self._contents, *_ = read_contents(database, self._manifest, self.documents)
        return self._contents

    def clear(self, model: ModelIdentity, language: str = "") -> None:
        """Remove everything, and begin new files; the old ones are removed after `commit`."""
        language = language or (self.manifest or Manifest(model)).language
        number = 1 + max(databases_of(path.name for path in self.folder.iterdir()), default=0)
        self._open(number, (*TABLES, *SCHEMA))
        self._contents, self._checksums = Contents(documents=self.documents), []
        self.manifest = Manifest(model, file_number=number, language=language)

    def use_language(self, language: str) -> None:
        """Set the language of stems; the full-text index is made again if it has another."""
        if self._manifest.language != language:
            self.manifest = replace(self._manifest, language=language, words_end=0)

    def upsert(self, batch: EmbeddedBatch) -> None:
        """Add documents; see `rag_demo.stores.store.Store.upsert`."""
        before = self.contents.owners
        changed = self.contents.with_batch(batch)
        self.write(changed, before, lambda rows: batch.vectors[rows - len(before)])

    def delete(self, ids: Sequence[str]) -> int:
        """Remove documents, and return how many; their data stay in the files for some time."""
        before = self.contents
        self.write(before.without(ids), before.owners, lambda rows: np.empty((0, 1), np.float32))
        return before.count - self.contents.count

    def write(self, contents: Contents, before: Rows, take: Callable[[Rows], Vectors]) -> None:
        """Write new rows of vectors with their owners, and the changed owners of present rows.

        The vectors are on the disk when this returns, the owners after `commit`.

        Args:
            contents: What is going to be committed, of documents that are in the database.
            before: The owners of the present rows.
            take: Returns the vectors of new rows: shape (m, d), float32.

        Raises:
            ValueError: The vectors have another dimension than those of the index.
        """
        owners, present, manifest = contents.owners, len(before), self._manifest
        pieces, dimension = {*(np.flatnonzero(owners[:present] != before) // PIECE)}, 0
        with writing_errors(self.folder), self.documents.use() as connection:
            if len(owners) > present:
                # A file without rows may have some of a writer that was killed.
                flags = os.O_WRONLY | (0 if present else os.O_CREAT)
                path = self.folder / manifest.vectors_name
                with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
                    for piece in range(present // PIECE, -(-len(owners) // PIECE)):
                        start = max(present, piece * PIECE)
                        rows = np.arange(start, min(piece * PIECE + PIECE, len(owners)))
                        vectors = take(rows)
                        if start:
                            check_dimension(vectors, dimension or manifest.dimension)
                        dimension = vectors.shape[1]
                        file.seek(start * dimension * 4)
                        file.write(as_bytes(vectors))
                        known = self._checksums[piece] if start > piece * PIECE else 0
                        self._checksums[piece:] = [zlib.crc32(as_bytes(vectors), known)]
                        pieces.add(piece)
                    file.flush()
                    os.fsync(file.fileno())
            for piece in sorted(map(int, pieces)):
                some = slice(piece * PIECE, (piece + 1) * PIECE)
                spans = np.ascontiguousarray(contents.spans[some], np.int32)
                row = (piece, owners[some].tobytes(), spans.tobytes(), self._checksums[piece])
                connection.execute("INSERT OR REPLACE INTO pieces VALUES (?, ?, ?, ?)", row)
        self._contents = contents
        self.manifest = replace(
            manifest,
            rows=len(owners),
            dimension=dimension or manifest.dimension,
            next_number=contents.next_number,
            count=contents.count,
        )

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """Return a document for each id; None for an unknown one."""
        return self.contents.get(ids)

    def matching(self, where: Where) -> list[str]:
        """Return the ids of the documents that match a filter."""
        return self.contents.matching(where)

    def of_files(self, files: Sequence[str] | None) -> list[str]:
        """Return the ids of the documents of files; None for all documents."""
        alive = self.contents.alive
        if files is None:
            return self.documents.ids(np.flatnonzero(alive))
        return self.documents.of_files(files, alive)

    def check(self) -> None:
        """Check the committed database and vectors; damaged words are made again.

        Raises:
            DamagedIndexError: Something is damaged.
        """
        with contextlib.closing(SavedIndex(self.folder)) as saved:
            saved.check()
            self.manifest = replace(self._manifest, words_end=saved.words.end)

    def keep(self, source: str | None, *, finished: bool) -> None:
        """Commit all changes, and go on; make the files again if they waste space."""
        wastes_space = finished and self.contents.wastes_space
        self.commit(source=source, finished=finished, words_may_lack=0 if finished else MOST_BEHIND)
        if wastes_space:
            with contextlib.closing(SavedIndex(self.folder)) as old:
                self.clear(old.manifest.model)
                for batch in old.contents.batches(old.take):
                    self.upsert(batch)
                self.commit(source=source, words_may_lack=0)

    def commit(
        self,
        name: str | None = None,
        *,
        source: str | None = None,
        finished: bool = True,
        words: Callable[[], WordsFolder | None] = lambda: None,
        words_may_lack: int = MOST_BEHIND,
    ) -> None:
        """Make all changes since the last commit durable.

        Args:
            name: The name of the new commit, which no other has.
            source: What is indexed.
            finished: Whether all of it is.
            words: Returns a full-text index of these documents, from which to begin.
            words_may_lack: How many documents the full-text index may lack.

        Raises:
            IndexFileError: The index cannot be written. It is what it was before.
        """
        if self._manifest.next_number - self._manifest.words_end > words_may_lack:
            self._write_words(words())
        commit = name or secrets.token_hex(8)
        manifest = replace(self._manifest, source=source, finished=finished, commit=commit)
        with writing_errors(self.folder), self.documents.use() as connection:
            if manifest.rows:
                (self.folder / manifest.vectors_name).stat()  # A missing file is damage.
            connection.execute("DELETE FROM manifest")
            row = (json.dumps(asdict(manifest)),)
            connection.execute("INSERT INTO manifest VALUES (?)", row)
            connection.execute("COMMIT")  # SQLite syncs the folder too, with its journal.
            self.manifest = manifest
            connection.execute("BEGIN IMMEDIATE")

    def _write_words(self, known: WordsFolder | None) -> None:
        """Write a full-text index of all documents, if that is possible."""
        manifest = self._manifest
        if known is None or known.end <= manifest.words_end:
            known = manifest.words(self.folder)
        changed = replace(manifest, words_end=manifest.next_number)
        new = self.folder / changed.words_name
        try:
            start = copy_words(known, new)
            index_words(new, start, self.documents, self.contents.alive, manifest.language)
            for path in new.iterdir():
                shutil.copymode(self.folder / database_name(manifest.file_number), path)
            checksum = checksum_of(new)
        except (ValueError, OSError) as error:
            log.debug("an index is saved without its full-text index: %s", error)
            return
        self.manifest = replace(changed, words_checksum=checksum)

    def close(self) -> None:
        """Undo what was not committed, and remove what the committed state does not name."""
        self.documents.close()
        with contextlib.suppress(OSError, IndexFileError):  # The next writer tries again.
            committed = None
            with contextlib.suppress(MissingIndexError):
                committed = read_manifest(self.folder)
            for path in list(self.folder.iterdir()):
                if not is_part(path.name) or (committed and committed.names(path.name)):
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)

    @property
    def _manifest(self) -> Manifest:
        assert self.manifest is not None, "call clear() first in a folder without an index"
        return self.manifest
