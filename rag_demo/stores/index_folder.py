"""The folder of a saved index: its files, its manifest, its errors, its reader and its one writer.

============================  ==================================================================
``rag-demo-N.sqlite``         the manifest, documents, their metadata, and the owners of vectors
``vectors-N.f32``             float32 vectors
``words-N-K/``                the full-text index, a folder that never changes
============================  ==================================================================

A change is one transaction of the database. Documents and vectors only grow, and deleting is a
mark, so readers hold no locks. A writer locks the folder. It begins another N to start over; the
highest N with a manifest counts, and the writer removes the others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import mmap
import os
import re
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
import numpy.typing as npt

from rag_demo.documents.document import Document
from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import (
    HOW_TO_CREATE,
    HOW_TO_REBUILD,
    DamagedIndexError,
    IndexFileError,
    IndexVersionError,
    MissingIndexError,
    RagDemoError,
    UnreadableIndexError,
    WriterBusyError,
    damaged,
    unwritable,
)
from rag_demo.stores.documents import SCHEMA, DamagedRowError, DocumentTable
from rag_demo.stores.filters import Where
from rag_demo.stores.store import EmbeddedBatch, batches_of, places_of_older
from rag_demo.stores.words import WordsFolder, add_texts, checksum_of, new_words
from rag_demo.vectors import Mask, Rows, Vectors, check_dimension, renumbered

VERSION = 3
GONE = -1
"""The owner of a row whose document was deleted."""
PIECE = 1 << 10
"""Rows of vectors, at most, that are written and checked together."""
TABLES = (
    "CREATE TABLE manifest (value TEXT)",
    "CREATE TABLE pieces (row INTEGER PRIMARY KEY, owners BLOB, passages BLOB, checksum INTEGER)",
)
_PART = re.compile(r"rag-demo-\d+\.sqlite(-journal|-wal|-shm)?|vectors-\d+\.f32|words-\d+-\d+")
_DATABASE = re.compile(r"rag-demo-(\d+)\.sqlite")
_ATTEMPTS = 20  # another process may replace the files while they are being opened
# SQLite's messages about a disk, a quota or a permission. The database may be intact.
_IS_TRANSIENT = re.compile("unable to open|disk I/O|is full|readonly|interrupted|out of memory")

Passages = npt.NDArray[np.int32]
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Manifest:
    """The description of a saved index.

    Attributes:
        model: The embedding model that made the vectors.
        source: The source that was indexed, as `rag_demo.stores.ingest.ingest` got it.
        finished: Whether the whole source was indexed.
        dimension: Length of the vectors; 0 without vectors.
        rows: How many vectors count, including those of deleted documents.
        count: How many documents there are.
        next_number: The number of the next document.
        file_number: The N in the names of the files.
        identity: A random number, chosen when files with another N are begun.
        words_number: The K in the name of the full-text index.
        words_end: The full-text index has the documents with smaller numbers; 0 without one.
        words_checksum: The checksum of the full-text index.
        language: The language of stems in the full-text index.
        commit: A random string, chosen with every change.
        version: The version of the format.
    """

    model: ModelIdentity
    source: str | None = None
    finished: bool = True
    dimension: int = 0
    rows: int = 0
    count: int = 0
    next_number: int = 0
    file_number: int = 0
    identity: int = 0
    words_number: int = 0
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
        return f"words-{self.file_number}-{self.words_number}"

    def words(self, folder: Path) -> WordsFolder | None:
        """The full-text index in the folder of this index, or None."""
        if not self.words_end:
            return None
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


def is_part(name: str) -> bool:
    """Tell whether a file or folder is a part of an index."""
    return _PART.fullmatch(name) is not None


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of an array, without a copy if it is contiguous."""
    contiguous: Any = np.ascontiguousarray(array)
    return memoryview(contiguous).cast("B") if array.size else memoryview(b"")


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
        except OSError as error:
            raise damaged(Path(str(error.filename or folder)), error) from None
    raise damaged(Path(name), "it is missing")


def _read(folder: Path, use: Callable[[sqlite3.Connection, Manifest], _Result]) -> _Result:
    missing = MissingIndexError(f"there is no index in '{folder}'; {HOW_TO_CREATE}")
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        raise missing from None
    numbers = databases_of(names)
    if not numbers and any(map(is_part, names)):
        raise damaged(folder / database_name(1), "it is missing")
    for number in numbers:
        path = folder / database_name(number)
        with (
            reading_errors(path),
            contextlib.closing(
                sqlite3.connect(readable_uri(path), uri=True, timeout=5, isolation_level=None)
            ) as database,
        ):
            database.execute("BEGIN")
            (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            row = tables and database.execute("SELECT value FROM manifest").fetchone()
            if row:
                manifest = _parsed(path, row[0])
                if manifest.file_number != number:  # A writer removes what it does not name.
                    raise damaged(path, f"its manifest names files {manifest.file_number}")
                return use(database, manifest)
            # Tables are committed before there are other files.
            if not tables and any(each.startswith((f"vectors-{number}.", f"words-{number}-"))
                                  for each in names):  # fmt: skip
                raise damaged(path, "it is empty")
    raise missing


def _parsed(path: Path, text: str) -> Manifest:
    manifest = json.loads(text)
    if manifest.get("version") != VERSION:
        raise IndexVersionError(
            f"'{path}' has index version {manifest.get('version')}, but this program reads "
            f"version {VERSION}; use a matching rag-demo, or {HOW_TO_REBUILD} {path.parent} --yes"
        )
    return Manifest(**{**manifest, "model": ModelIdentity(**manifest["model"])})


def readable_uri(path: Path) -> str:
    """Return the URI by which SQLite can read a database.

    Raises:
        OSError: The file is missing.
    """
    # Do not open the file here: closing it would drop SQLite's locks in this process.
    path.stat()
    # Who may write also undoes what a killed writer has left.
    way = "mode=rw" if os.access(path.parent, os.W_OK) and os.access(path, os.W_OK) else "mode=ro"
    return f"file:{quote(os.fsencode(path.resolve()))}?{way}"


def busy(folder: Path) -> WriterBusyError:
    """Make the error for a folder into which another process is writing."""
    return WriterBusyError(
        f"another process is writing into '{folder}'; try again when it has finished"
    )


def _is_busy(error: sqlite3.Error) -> bool:
    return "lock" in str(error) or "busy" in str(error)


@contextlib.contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading a database into this package's."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise  # A mistake of this program, such as a closed connection.
    except sqlite3.OperationalError as error:
        if _is_busy(error):
            raise busy(path.parent) from None
        if _IS_TRANSIENT.search(str(error)):
            raise UnreadableIndexError(
                f"'{path}' cannot be read: {error}; check its permissions and try again"
            ) from None
        raise damaged(path, error) from None
    except (sqlite3.Error, DamagedRowError, ValueError, TypeError, KeyError) as error:
        raise damaged(path, error) from None


@contextlib.contextmanager
def writing_errors(folder: Path) -> Iterator[None]:
    """Turn errors of writing an index into this package's."""
    try:
        yield
    except sqlite3.ProgrammingError:
        raise
    except sqlite3.OperationalError as error:
        if _is_busy(error):
            raise busy(folder) from None
        raise IndexFileError(
            f"the index cannot be written to '{folder}': {error}; "
            "free some space, or name another folder"
        ) from None
    except (sqlite3.Error, DamagedRowError) as error:
        raise damaged(folder, error) from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and folder.exists() and error.filename:
            raise damaged(Path(str(error.filename)), "it is missing") from None
        raise unwritable(folder, error) from None


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
    return DocumentTable(connect, translate_errors=errors)


@contextlib.contextmanager
def _temporary_errors() -> Iterator[None]:
    try:
        yield
    except (sqlite3.OperationalError, DamagedRowError) as error:
        raise RagDemoError(f"a temporary file cannot be used: {error}") from None


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
        words_index: It, open; None if tantivy cannot open it.

    Raises:
        IndexFileError: The index is missing, damaged, or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        reading(folder, self._open)

    def _open(self, database: sqlite3.Connection, manifest: Manifest) -> None:
        path = self.folder / database_name(manifest.file_number)
        self.manifest = manifest
        pieces = read_pieces(database, manifest)
        self.owners, self.passages, self.alive, self._starts, self._checksums = pieces
        shape = (manifest.rows, manifest.dimension)
        self._is_checked, self._nbytes = False, 4 * shape[0] * shape[1]
        self._vectors_path = self.folder / manifest.vectors_name
        with contextlib.ExitStack() as stack:
            memory: Any = b""
            self._close: Any = lambda: None
            if self._nbytes:  # An index without vectors has no file.
                self._file: Any = self._vectors_path.open("rb", buffering=0)
                self._close = weakref.finalize(self, self._file.close)
                self._close.atexit = False
                stack.callback(self._close)
                self.check_length()
                # Mapped privately: changes of the memory do not reach the file.
                memory = mmap.mmap(self._file.fileno(), self._nbytes, access=mmap.ACCESS_COPY)
            self._mapped: Vectors = np.frombuffer(memory, np.float32).reshape(shape)
            self.documents = temporary_documents(path, manifest)
            stack.callback(self.documents.close)
            with self.documents.use():  # It stays open, even if the file is removed.
                pass
            words = manifest.words(self.folder)
            self.words = words if words is not None and words.is_whole() else None
            self.words_index = None if self.words is None else self.words.open()
            stack.pop_all()

    def verify(self) -> None:
        """Check the database, all vectors and the full-text index.

        Raises:
            IndexFileError: Something is damaged.
        """
        self.check()
        with self.documents.use():
            numbers = [n for n, _ in self.documents.stream() if self.alive[n]]
            if len(numbers) != self.manifest.count:
                raise DamagedRowError("documents are missing")
        words = self.manifest.words(self.folder)
        if words is not None and self.words is None:
            raise damaged(words.folder, "its checksum is wrong")

    def check(self) -> None:
        """Check the structure of the database, and all vectors."""
        with self.documents.use() as connection:  # Also the attached database.
            (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if found != "ok":
                raise DamagedRowError(found)
        self.check_vectors()

    def check_length(self) -> None:
        """Check the length of the file; reading mapped memory beyond the end is a SIGBUS.

        Raises:
            IndexFileError: The file was cut off.
        """
        size = os.fstat(self._file.fileno()).st_size if self._nbytes else 0
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
        if os.preadv(self._file.fileno(), [as_bytes(out)], place) != out.nbytes:
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
        self._close()


_FEWEST_UNUSED = 1 << 12
MOST_BEHIND = 1 << 13
"""Documents that a commit may leave out of the full-text index; a reader adds them itself."""

log = logging.getLogger("rag_demo")


class IndexWriter:
    """The only writer of an index. Use it with ``with``; without `commit`, changes are lost.

    Readers are not disturbed. If nothing is committed, a folder that was made is removed.

    Args:
        folder: The folder of the index. It is created if it is missing.
        start_over: Whether the first commit may replace a damaged index.

    Attributes:
        manifest: What is going to be committed; None in a folder without an index.
        owners: The number of the document that each row belongs to, or `GONE`.

    Raises:
        IndexFileError: The folder holds something else, cannot be written, or another process
            is writing into it; or the index is damaged.
    """

    def __init__(self, folder: Path, *, start_over: bool = False) -> None:
        self.folder = folder
        self.manifest: Manifest | None = None
        self.owners: Rows = np.empty(0, np.int64)
        self._starts: list[int] = []  # of the pieces
        self._committed: Manifest | None = None
        self._made_folders = [each for each in (folder, *folder.parents) if not each.exists()]
        self._is_known = False  # Remove nothing before it is known what is committed.
        self._lock = -1
        self._documents: DocumentTable | None = None
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
        """Read the committed state, and begin a transaction."""
        try:
            manifest = read_manifest(self.folder)
        except MissingIndexError:
            return
        path = self.folder / database_name(manifest.file_number)
        with reading_errors(path), self._open(manifest.file_number).use() as connection:
            self.owners, _, _, starts, _ = read_pieces(connection, manifest)
        self._starts = starts[:-1].tolist()
        self.manifest = self._committed = manifest

    def _open(self, number: int, identity: int = 0) -> DocumentTable:
        """Open a database, and begin a transaction; with an identity make its tables."""
        self._close_documents()
        path = self.folder / database_name(number)
        connection = sqlite3.connect(path, timeout=5, isolation_level=None, check_same_thread=False)
        # Not a method of this writer: the cycle would keep the lock until a collection.
        self._documents = DocumentTable(lambda: connection)
        with self._documents.use():
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
        return self._documents

    def _close_documents(self) -> None:
        if self._documents is not None:
            self._documents.close()  # This rolls back what was not committed.
            self._documents = None

    @property
    def documents(self) -> DocumentTable:
        """The documents as they will be committed; `alive` says which of them count."""
        assert self._documents is not None, "call clear() first in a folder without an index"
        return self._documents

    @property
    def alive(self) -> Mask:
        """Whether the document of each number exists."""
        return alive_of(self.owners, self._manifest.next_number)

    def clear(self, model: ModelIdentity, language: str = "") -> None:
        """Remove everything, and begin new files; the old ones are removed after `commit`."""
        before = self.manifest or Manifest(model)
        identity = 1 + int.from_bytes(os.urandom(4), "big") % (2**31 - 2)
        with writing_errors(self.folder):
            number = 1 + max(databases_of(path.name for path in self.folder.iterdir()), default=0)
            self._open(number, identity)
        self.owners, self._starts = np.empty(0, np.int64), []
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
        rows = start = len(self.owners)
        with writing_errors(self.folder):
            self.documents.insert(documents)
            self._set_owners(owners[:rows])
            for part in vectors:
                for some in np.split(part, range(PIECE, len(part), PIECE)):
                    stop = start + len(some)
                    spans = passages[start - rows : stop - rows]
                    self._append_piece(owners[start:stop], spans, some)
                    start = stop
        self.owners = owners
        self.manifest = replace(self._manifest, next_number=next_number)

    def _append_piece(self, owners: Rows, passages: Passages, vectors: Vectors) -> None:
        manifest, dimension = self._manifest, vectors.shape[1]
        if manifest.rows:
            check_dimension(vectors, manifest.dimension)
        flags = os.O_WRONLY | (0 if manifest.rows else os.O_CREAT | os.O_EXCL)
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

    def _set_owners(self, owners: Rows) -> None:
        changed = np.searchsorted(self._starts, np.flatnonzero(owners != self.owners), "right") - 1
        ends = [*self._starts[1:], len(owners)]
        with self.documents.use() as connection:
            for piece in np.unique(changed).tolist():
                start = self._starts[piece]
                some = owners[start : ends[piece]].tobytes()
                connection.execute("UPDATE pieces SET owners = ? WHERE row = ?", (some, start))
        self.owners = owners

    def upsert(self, batch: EmbeddedBatch) -> None:
        """Add documents; see `rag_demo.stores.store.Store.upsert`."""
        with writing_errors(self.folder):
            older = self.documents.find([each.id for each in batch.documents], self.alive)
            first = self._manifest.next_number
            taken = places_of_older(batch, older, self.documents.get)
        changes = {number: first + at if at >= 0 else GONE for number, at in taken.items()}
        self.append(
            enumerate(batch.documents, first),
            np.concatenate([renumbered(self.owners, changes, first), batch.owners + first]),
            batch.spans,
            [batch.vectors] if len(batch.vectors) else [],
            first + len(batch.documents),
        )

    def delete(self, ids: Sequence[str]) -> int:
        """Remove documents, and return how many; their data stay in the files for some time."""
        with writing_errors(self.folder):
            gone = dict.fromkeys(self.documents.find(ids, self.alive).values(), GONE)
            self._set_owners(renumbered(self.owners, gone, self._manifest.next_number))
        return len(gone)

    def get(self, ids: Sequence[str]) -> list[Document | None]:
        """Return a document for each id; None for an unknown one."""
        with writing_errors(self.folder):
            return self.documents.known(ids, self.alive)

    def matching(self, where: Where) -> list[str]:
        """Return the ids of the documents that match a filter."""
        return self.documents.ids(np.flatnonzero(self.documents.matching(where, self.alive)))

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
            start = new_words(new, known)
            add_texts(new, self.documents, start, self.alive, manifest.language)
            for path in new.iterdir():
                shutil.copymode(self.folder / database_name(manifest.file_number), path)
            checksum = checksum_of(new)
        except (RagDemoError, ValueError, OSError) as error:
            log.debug("an index is saved without its full-text index: %s", error)
            return
        self.manifest = replace(changed, words_end=manifest.next_number, words_checksum=checksum)

    def keep(self, source: str | None, *, finished: bool) -> None:
        """Commit all changes, and go on; make the files again if they waste space."""
        if finished and not self.wastes_space:
            self.catch_up_words()
        self.commit(source, finished=finished)
        if not finished or not self.wastes_space:
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
        except IndexFileError as error:
            log.warning("the change is saved, but deleted texts still take space: %s", error)
            self._read()

    def commit(
        self,
        source: str | None = None,
        *,
        finished: bool = True,
        announce: Callable[[Manifest], object] = lambda manifest: None,
    ) -> None:
        """Make all changes since the last commit durable.

        Args:
            source: What is indexed.
            finished: Whether all of it is.
            announce: Called with what will be committed, when only the end of the transaction is
                missing.

        Raises:
            IndexFileError: The index cannot be written. It is what it was before.
        """
        self.catch_up_words(MOST_BEHIND)
        commit, before = os.urandom(8).hex(), self._committed
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
            announce(manifest)
            self._is_known = False  # After an interrupt it is unknown what is committed.
            connection.execute("COMMIT")
            self.manifest = self._committed = manifest
            self._is_known = True
            connection.execute("BEGIN IMMEDIATE")

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
