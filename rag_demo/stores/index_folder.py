"""The folder of a saved index: its files, its manifest, its errors, its reader and its one writer.

============================  ==================================================================
``rag-demo-N.sqlite``         the manifest, documents, their metadata, and the owners of vectors
``vectors-N.f32``             float32 vectors
``words-N-COUNT-LANGUAGE/``   the full-text index of the first documents; it never changes
============================  ==================================================================

A change is one transaction of the database. Documents and vectors only grow, and deleting is a
mark, so readers hold no locks. A writer locks the folder. It begins another N to start over; the
highest N with a manifest counts, and the writer removes the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import sqlite3
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from rag_demo import errors
from rag_demo.database import DamagedRowError, index_errors
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.reading.document import Document
from rag_demo.stores.documents import GONE, SCHEMA, Contents, DocumentTable
from rag_demo.stores.filters import Where
from rag_demo.stores.store import EmbeddedBatch
from rag_demo.stores.words import TextIndex, WordsFolder
from rag_demo.vectors import Rows, Take, Vectors, check_dimension

VERSION = 6
PIECE = 1 << 8
"""Rows that are written and checked together; the last piece may have fewer."""
TABLES = (
    "CREATE TABLE manifest (value TEXT)",
    # The checksum is first, so that SQLite finds it without the pages of the rest.
    "CREATE TABLE pieces (piece INTEGER PRIMARY KEY, checksum INTEGER, owners BLOB, passages BLOB)",
)
_PART = re.compile(r"rag-demo-\d+\.sqlite(-journal|-wal|-shm)?|vectors-\d+\.f32|words-\d+-\d+-\w+")
_DATABASE = re.compile(r"rag-demo-(\d+)\.sqlite")
MOST_BEHIND = 1 << 13
"""Documents that a commit may leave out of the full-text index; a reader adds them itself."""
_ATTEMPTS = 20  # another process may replace the files while they are being opened

log = logging.getLogger("rag_demo")

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Manifest:
    """The description of a saved index.

    Attributes:
        model: The `ModelIdentity` of the vectors; None if it is unknown.
        source: The source that was indexed, as `rag_demo.stores.ingest.ingest` got it.
        finished: Whether the whole source was indexed.
        dimension: Length of the vectors; 0 without vectors.
        rows: How many vectors count, including those of deleted documents.
        count: How many documents there are.
        next_number: The number of the next document.
        file_number: The N in the names of the files.
        words_end: The full-text index has the documents with smaller numbers; 0 without one.
        words_checksum: The checksum of the full-text index.
        language: The language of stems in the full-text index.
        commit: A random string, chosen with every change.
        version: The version of the format.
    """

    model: Any
    source: str | None = None
    finished: bool = True
    dimension: int = 0
    rows: int = 0
    count: int = 0
    next_number: int = 0
    file_number: int = 0
    words_end: int = 0
    words_checksum: int = 0
    language: str = "english"
    commit: str = ""
    version: int = VERSION

    @property
    def vectors_name(self) -> str:
        """The name of the file of vectors."""
        return f"vectors-{self.file_number}.f32"

    @property
    def words_name(self) -> str:
        """The name of the folder of the full-text index."""
        return f"words-{self.file_number}-{self.words_end}-{self.language}"

    def words(self, folder: Path) -> WordsFolder:
        """The full-text index in the folder of this index; its end is 0 without one."""
        return WordsFolder(folder / self.words_name, self.words_end, self.words_checksum)

    def names(self, part: str) -> bool:
        """Tell whether a file or folder belongs to this state."""
        of_database = part.startswith(database_name(self.file_number))
        return of_database or part in (self.vectors_name, self.words_name)


def database_name(number: int) -> str:
    """Return the name of the Nth database."""
    return f"rag-demo-{number}.sqlite"


def databases_of(names: Iterable[str]) -> list[int]:
    """Return the numbers of the databases of a folder, the newest first."""
    return sorted((int(each[1]) for each in map(_DATABASE.fullmatch, names) if each), reverse=True)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index. Takes a millisecond.

    Raises:
        IndexFileError: The index is missing, damaged, or of another version.
    """
    return reading(folder, lambda connection, manifest: manifest)


def reading(folder: Path, use: Callable[[sqlite3.Connection, Manifest], _Result]) -> _Result:
    """Call a function with the newest database and its manifest, in a transaction.

    It is called again if another process has replaced the files meanwhile.

    Raises:
        IndexFileError: The index is missing, damaged or unreadable.
    """
    for _ in range(_ATTEMPTS):
        try:
            return _read(folder, use)
        except FileNotFoundError as error:
            name = str(error.filename)
    raise errors.damaged(Path(name), "it is missing")


def _read(folder: Path, use: Callable[[sqlite3.Connection, Manifest], _Result]) -> _Result:
    names: list[str] = []
    with index_errors(folder), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = [path.name for path in folder.iterdir()]
    numbers = databases_of(names)
    if not numbers and any(map(_PART.fullmatch, names)):
        raise errors.damaged(folder / database_name(1), "it is missing")
    for number in numbers:
        path = folder / database_name(number)
        with (
            index_errors(path),
            contextlib.closing(
                sqlite3.connect(readable_uri(path), uri=True, isolation_level=None)
            ) as database,
        ):
            database.execute("BEGIN")
            (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if row := tables and database.execute("SELECT value FROM manifest").fetchone():
                try:
                    known = json.loads(row[0])
                    if known.get("version") != VERSION:
                        raise errors.IndexVersionError(
                            f"'{path}' has index version {known.get('version')}, but this program "
                            f"reads {VERSION}; use a matching rag-demo, or {errors.HOW_TO_REBUILD} "
                            f"{folder} --yes"
                        )
                    known |= {"model": ModelIdentity(**known["model"]), "file_number": number}
                    return use(database, Manifest(**known))
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise errors.damaged(path, error) from None
            # Tables are committed before there are other files.
            if not tables and any(each.startswith((f"vectors-{number}.", f"words-{number}-"))
                                  for each in names):  # fmt: skip
                raise errors.damaged(path, "it is empty")
    raise errors.MissingIndexError(f"there is no index in '{folder}'; {errors.HOW_TO_CREATE}")


def readable_uri(path: Path) -> str:
    """Return the URI by which SQLite can read a database.

    Raises:
        OSError: The file is missing.
        DamagedIndexError: It does not end with a page.
    """
    # Do not open the file here: closing it would drop SQLite's locks in this process.
    if path.stat().st_size % 512:  # A page has at least so many bytes.
        raise errors.damaged(path, "it was cut off")
    # SQLite opens a file that it may not write for reading.
    return f"file:{quote(os.fsencode(path.resolve()))}?mode=rw"


def temporary_documents(path: Path | None = None, stop: int = 0) -> DocumentTable:
    """Return a table in a temporary file, which goes on after the documents of a saved index.

    SQLite makes the file when the table no longer fits into its cache, and removes its name.

    Args:
        path: The database of the saved index, if any.
        stop: The number after its last document.

    Raises:
        OSError: The database of the saved index is missing.
        IndexFileError: It is damaged.
    """

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect("", uri=True, isolation_level=None, check_same_thread=False)
        try:
            for statement in SCHEMA:
                connection.execute(statement)
            if path is not None:
                connection.execute("ATTACH ? AS saved", (readable_uri(path),))
                for table in ("documents", "metadata"):
                    connection.execute(
                        f"CREATE TEMP VIEW {table} AS SELECT * FROM saved.{table}"
                        f" WHERE number < {stop} UNION ALL SELECT * FROM main.{table}"
                    )
        except BaseException:  # An interrupt must not leave it open.
            connection.close()
            raise
        return connection

    errors = partial(index_errors, path or Path("a temporary file"))
    documents = DocumentTable(connect, translate_errors=errors)
    documents.saved = stop
    return documents


def read_contents(
    database: sqlite3.Connection, manifest: Manifest, documents: DocumentTable
) -> tuple[Contents, list[int]]:
    """Read which document each vector belongs to.

    Returns:
        The contents, and the checksum of each piece of the file.

    Raises:
        DamagedRowError: They do not match the manifest.
    """
    rows = database.execute("SELECT owners, passages, checksum FROM pieces ORDER BY piece")
    owners, passages, checksums = list(zip(*rows, strict=True)) or ((), (), ())
    try:
        contents = Contents(
            documents=documents,
            owners=np.frombuffer(bytearray().join(owners), np.int64),
            spans=np.frombuffer(bytearray().join(passages), np.int32).reshape(-1, 2),
            next_number=manifest.next_number,
            identity=manifest.model if manifest.rows else None,
        )
        is_whole = (
            len(contents.owners) == len(contents.spans) == manifest.rows
            and len(checksums) == len(range(0, manifest.rows, PIECE))
            and contents.owners.min(initial=GONE) >= GONE
            and contents.owners.max(initial=GONE) < manifest.next_number
            and contents.count == manifest.count
        )
    except (ValueError, TypeError):
        is_whole = False
    if not is_whole:
        raise DamagedRowError("its pieces do not match its manifest")
    return contents, list(checksums)


class SavedIndex:
    """A snapshot of the index in a folder. Changes by other processes do not affect it.

    Opening takes milliseconds. Vectors are checked when they are first used.

    Args:
        folder: The folder of the index.

    Attributes:
        manifest: The manifest.
        contents: The documents, and the owner of each row.
        words: The full-text index; empty if it is damaged or cannot be opened.

    Raises:
        IndexFileError: The index is missing, damaged, or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        reading(folder, self._open)

    def _open(self, database: sqlite3.Connection, manifest: Manifest) -> None:
        path = self.folder / database_name(manifest.file_number)
        self.manifest = manifest
        documents = temporary_documents(path, manifest.next_number)
        self.contents, self._checksums = read_contents(database, manifest, documents)
        shape = (manifest.rows, manifest.dimension)
        self._is_checked, self._nbytes = False, 4 * shape[0] * shape[1]
        self._vectors_path = self.folder / manifest.vectors_name
        self._mapped: Vectors = np.empty((0, manifest.dimension), np.float32)
        self._close: Any = lambda: None
        try:
            if self._nbytes:  # An index without vectors has no file.
                self._file: Any = self._vectors_path.open("rb", buffering=0)
                self._close = weakref.finalize(self, self._file.close)
                self._close.atexit = False
                self.check_length()
                # Mapped privately: changes of the memory do not reach the file.
                self._mapped = np.asarray(np.memmap(self._file, np.float32, "c", shape=shape))
            with documents.use():  # It stays open, even if the file is removed.
                pass
            self.words = TextIndex(manifest.language, manifest.words(self.folder))
        except BaseException:  # An interrupt must not leave files open either.
            self.close()
            raise

    def verify(self) -> None:
        """Check the database, all vectors and the full-text index.

        The next commit of another process may remove the full-text index; then it is not checked.

        Raises:
            IndexFileError: Something is damaged.
        """
        self.check()
        words = self.manifest.words(self.folder)
        if words.end and not words.is_whole and read_manifest(self.folder) == self.manifest:
            raise errors.DamagedIndexError(  # Texts and vectors are whole: do not name --yes.
                f"'{words.folder}' is damaged (it is missing or unreadable, or its checksum is "
                "wrong); searches make their own, and the next rag-demo add or index a new one"
            )

    def check(self) -> None:
        """Check the database with all documents, and all vectors."""
        documents = self.contents.documents
        with documents.use() as connection:  # Also the attached database.
            (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise DamagedRowError(found)
            if sum(1 for _ in documents.stream(self.contents.alive)) != self.manifest.count:
                raise DamagedRowError("documents are missing")
        self.check_vectors()

    def check_length(self) -> None:
        """Check the length of the file; reading mapped memory beyond the end is a SIGBUS.

        Raises:
            IndexFileError: The file was cut off.
        """
        if self._nbytes and os.fstat(self._file.fileno()).st_size < self._nbytes:
            raise errors.damaged(self._vectors_path, "it was cut off")

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
            start = piece * PIECE
            count = min(PIECE, self.manifest.rows - start)
            vectors: Any = np.empty((count, self.manifest.dimension), np.float32)
            self.read_into(start, vectors)
            if zlib.crc32(vectors) != self._checksums[piece]:
                raise errors.damaged(self._vectors_path, f"the checksum of row {start} is wrong")

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:  # zlib releases the GIL.
            list(threads.map(check, range(len(self._checksums))))
        self._is_checked = True

    def take(self, rows: Rows, *, mapped: bool = True) -> Vectors:
        """Return a copy of the vectors of rows, checked: shape (n, d).

        Args:
            rows: The numbers of the rows.
            mapped: Whether the file's pages may stay in memory, which is faster.
        """
        self.check_length()
        self.check_vectors()
        if mapped:
            return np.asarray(self._mapped.take(rows, axis=0))
        result = np.empty((len(rows), self.manifest.dimension), np.float32)
        for place, row in enumerate(rows.tolist()):
            self.read_into(row, result[place : place + 1])
        return result

    def read_into(self, start: int, out: Any) -> None:
        """Read consecutive vectors, unchecked, without keeping the file's pages in memory.

        Args:
            start: The first row.
            out: Shape (n, d).
        """
        place = start * 4 * self.manifest.dimension
        if os.preadv(self._file.fileno(), [out], place) != out.nbytes:
            raise errors.damaged(self._vectors_path, "it was cut off")

    def close(self) -> None:
        """Close all files. Arrays that are still referenced stay readable."""
        self.contents.documents.close()
        self._mapped = np.empty((0, 0), np.float32)
        self._close()


@contextlib.contextmanager
def open_writer(
    folder: Path, *, start_over: bool = False, check: bool = False
) -> Iterator[IndexWriter]:
    """Lock the folder of an index, and yield its writer. What was not committed is lost.

    Readers are not disturbed. After an error of a change, leave the block.

    Args:
        folder: The folder of the index. It is created if it is missing.
        start_over: Whether the first commit may replace a damaged index.
        check: Whether to look for damage in all of the index; a damaged full text is made again.

    Raises:
        IndexFileError: The folder holds something else, cannot be written, or another process
            is writing into it; or the index is damaged.
    """
    with contextlib.ExitStack() as stack:
        if _lock(folder, stack):
            stack.callback(_remove_empty, folder)
        names = [path.name for path in folder.iterdir()]
        foreign = [name for name in names if not _PART.fullmatch(name)]
        if foreign and not databases_of(names):
            raise errors.IndexFileError(
                f"'{folder}' holds {foreign[0]!r} and is not an index; "
                "name a new or an empty folder"
            )
        writer = stack.enter_context(contextlib.closing(IndexWriter(folder)))
        ignored = (errors.DamagedIndexError, errors.IndexVersionError) if start_over else ()
        with contextlib.suppress(*ignored):
            writer.open(check=check)
        yield writer


def _lock(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Lock a folder until the stack is closed; return whether it was made for that."""
    while True:
        is_new = not folder.exists()
        with index_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue  # Another writer has removed its empty folder.
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # A killed process loses it.
        except BlockingIOError:
            raise errors.WriterBusyError(
                f"another process is writing into '{folder}'; try again when it has finished"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(folder.stat(), os.fstat(descriptor)):
                return is_new


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # It holds an index.
        folder.rmdir()


class IndexWriter:
    """The writer of an index whose folder is locked; see `open_writer`.

    Attributes:
        manifest: What is going to be committed; without a model in a folder without an index.
        documents: All documents, by number.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest(None)
        self.documents = temporary_documents()  # until a database is opened
        self._words = TextIndex("none")
        self._contents: Contents | None = None  # until it is needed
        self._checksums: list[int] = []  # of the pieces

    def open(self, *, check: bool = False) -> None:
        """Read the committed state, if any, and begin a transaction; see `open_writer`."""
        with contextlib.suppress(errors.MissingIndexError):
            manifest = read_manifest(self.folder)
            self.manifest = Manifest(None, language=manifest.language)
            if check:
                with contextlib.closing(SavedIndex(self.folder)) as saved:
                    saved.check()
                    manifest = replace(manifest, words_end=saved.words.end)
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
        connect = partial(sqlite3.connect, path, isolation_level=None, check_same_thread=False)
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
                self._contents, *_ = read_contents(database, self.manifest, self.documents)
        return self._contents

    def clear(self, model: ModelIdentity) -> None:
        """Remove everything, and begin new files; the old ones are removed after `commit`."""
        number = 1 + max(databases_of(path.name for path in self.folder.iterdir()), default=0)
        self._open(number, (*TABLES, *SCHEMA))
        self._contents, self._checksums = Contents(documents=self.documents), []
        self._words.close()
        self.manifest = Manifest(model, file_number=number, language=self.manifest.language)

    def use_model(self, model: ModelIdentity) -> None:
        """Record another name, or another prompt of queries, of the model."""
        self.manifest = replace(self.manifest, model=model)

    def use_language(self, language: str) -> None:
        """Set the language of stems; the full-text index is made again if it has another."""
        if self.manifest.language != language:
            self.manifest = replace(self.manifest, language=language, words_end=0)
            self._words.close()

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

    def write(self, contents: Contents, before: Rows, take: Take) -> None:
        """Write new rows of vectors with their owners, and the changed owners of present rows.

        The vectors are on the disk when this returns, the owners after `commit`.

        Args:
            contents: What is going to be committed, of documents that are in the database.
            before: The owners of the present rows.
            take: Returns the vectors of new rows: shape (m, d), float32.

        Raises:
            ValueError: The vectors have another dimension than those of the index.
        """
        owners, present, manifest = contents.owners, len(before), self.manifest
        pieces, dimension = {*(np.flatnonzero(owners[:present] != before) // PIECE)}, 0
        with self.documents.use() as connection:
            if len(owners) > present:
                # It may have rows of a writer that was killed.
                path = self.folder / manifest.vectors_name
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
                    for piece in range(present // PIECE, -(-len(owners) // PIECE)):
                        start = max(present, piece * PIECE)
                        rows = np.arange(start, min(piece * PIECE + PIECE, len(owners)))
                        vectors: Any = np.ascontiguousarray(take(rows))
                        if start:
                            check_dimension(vectors, dimension or manifest.dimension)
                        dimension = vectors.shape[1]
                        file.seek(start * dimension * 4)
                        file.write(vectors)
                        known = self._checksums[piece] if start > piece * PIECE else 0
                        self._checksums[piece:] = [zlib.crc32(vectors, known)]
                        pieces.add(piece)
                    file.flush()
                    os.fsync(file.fileno())
            for piece in sorted(map(int, pieces)):
                some = slice(piece * PIECE, (piece + 1) * PIECE)
                spans = np.ascontiguousarray(contents.spans[some], np.int32)
                row = (piece, self._checksums[piece], owners[some].tobytes(), spans.tobytes())
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

    def matching(self, where: Where | None) -> list[str]:
        """Return the ids of the documents that match a filter; None for all."""
        return self.contents.matching(where)

    def of_files(self, files: Sequence[str]) -> list[str]:
        """Return the ids of the documents of files."""
        return self.documents.of_files(files, self.contents.alive)

    def keep(self, source: str | None, *, finished: bool) -> None:
        """Commit all changes, and go on; make the files again if they waste space."""
        wastes_space = finished and self.contents.wastes_space
        self.commit(source=source, finished=finished)
        if wastes_space:
            self.compact()

    def compact(self) -> None:
        """Make the files again from what is committed: nothing of deleted documents is in them.

        The old files are removed when this writer is closed, and end with their last reader.
        """
        with contextlib.closing(SavedIndex(self.folder)) as old:
            self.clear(old.manifest.model)
            for batch in old.contents.batches(old.take):
                self.upsert(batch)
            self.commit(source=old.manifest.source, finished=old.manifest.finished)

    def commit(
        self,
        name: str | None = None,
        *,
        source: str | None = None,
        finished: bool = True,
        words: TextIndex | None = None,
    ) -> None:
        """Make all changes since the last commit durable.

        Args:
            name: The name of the new commit, which no other has.
            source: What is indexed.
            finished: Whether all of it is.
            words: A full-text index of these documents, which may lack some at first; by default
                the one of this writer, which lacks none when all is indexed.

        Raises:
            IndexFileError: The index cannot be written. It is what it was before.
        """
        may_lack = 0 if finished and words is None else MOST_BEHIND
        if self.manifest.next_number - self.manifest.words_end > may_lack:
            self._write_words(words)
        commit = name or secrets.token_hex(8)
        manifest = replace(self.manifest, source=source, finished=finished, commit=commit)
        with self.documents.use() as connection:
            connection.execute("DELETE FROM manifest")
            row = (json.dumps(asdict(manifest)),)
            connection.execute("INSERT INTO manifest VALUES (?)", row)
            connection.execute("COMMIT")  # SQLite syncs the folder too, with its journal.
            self.manifest = manifest
            connection.execute("BEGIN IMMEDIATE")

    def _write_words(self, words: TextIndex | None) -> None:
        """Write a full-text index of all documents, if that is possible."""
        manifest = self.manifest
        if words is None and not self._words.end:
            self._words = TextIndex(manifest.language, manifest.words(self.folder))
        words, new = words or self._words, replace(manifest, words_end=manifest.next_number)
        try:
            words.catch_up(self.documents, self.contents.alive)
            saved = words.save(self.folder / new.words_name)
        except (errors.RagDemoError, OSError) as error:
            log.debug("an index is saved without its full-text index: %s", error)
        else:
            assert saved is not None
            self.manifest = replace(new, words_end=saved.end, words_checksum=saved.checksum)

    def close(self) -> None:
        """Undo what was not committed, and remove what the committed state does not name."""
        self._words.close()
        self.documents.close()
        with contextlib.suppress(OSError, errors.IndexFileError):  # The next writer tries again.
            committed = None
            with contextlib.suppress(errors.MissingIndexError):
                committed = read_manifest(self.folder)
            for path in list(self.folder.iterdir()):
                if not _PART.fullmatch(path.name) or (committed and committed.names(path.name)):
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
