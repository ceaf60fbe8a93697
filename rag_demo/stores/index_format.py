"""The format of a saved index: its files, its manifest, and the errors of reading and writing.

============================  ==================================================================
``index.sqlite``              the manifest, and which row of vectors belongs to which document
``documents-N.sqlite``        documents and their metadata
``vectors-N.f32``             float32 vectors
``words-N-K/``                the full-text index, a folder that never changes
============================  ==================================================================

Documents and vectors only grow; a transaction of ``index.sqlite`` records how many count. So a
crash leaves at most data that nobody reads, readers hold no locks, and deleting is a mark. A
writer locks the folder, takes another N if it must begin again, and removes only what the manifest
does not name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from rag_demo.encoding.model_identity import ModelIdentity
from rag_demo.errors import (
    HOW_TO_CREATE,
    HOW_TO_REBUILD,
    IndexFileError,
    IndexVersionError,
    UnreadableIndexError,
    WriterBusyError,
    damaged,
    unwritable,
)
from rag_demo.stores.documents import DamagedRowError
from rag_demo.stores.words import WordsFolder
from rag_demo.vectors import Rows

DATABASE = "index.sqlite"
VERSION = 2
GONE = -1
"""The owner of a row whose document was deleted."""
SEGMENT = 1 << 12
"""Rows of vectors that are described by one row of the table ``segments``."""
_PARTS = re.compile(r"(documents-\d+\.sqlite(-wal|-shm|-journal)?|vectors-\d+\.f32|words-\d+-\d+"
                    r"|scan-\d+\.i8)")  # fmt: skip
_OURS = re.compile(rf"index\.sqlite(-wal|-shm|-journal)?|{_PARTS.pattern}")
TABLES = (
    "CREATE TABLE manifest (value TEXT)",
    "CREATE TABLE segments (number INTEGER PRIMARY KEY, owners BLOB, passages BLOB,"
    " vector_checksums BLOB)",
)

# SQLite's messages about a disk, a quota or a permission. The database may be intact.
_IS_TRANSIENT = re.compile("unable to open|disk I/O|is full|readonly|interrupted|out of memory")

Passages = npt.NDArray[np.int32]


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
        words_number: The K in the name of the full-text index; 0 without one.
        words_end: The full-text index has the documents with smaller numbers.
        words_files: The checksums of the files of the full-text index.
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
    words_files: Mapping[str, int] = field(default_factory=dict)
    language: str = "english"
    commit: str = ""
    version: int = VERSION

    @property
    def documents_name(self) -> str:
        """The name of the database of documents."""
        return f"documents-{self.file_number}.sqlite"

    @property
    def vectors_name(self) -> str:
        """The name of the file of vectors."""
        return f"vectors-{self.file_number}.f32"

    def words(self, folder: Path) -> WordsFolder | None:
        """The full-text index in the folder of this index, or None."""
        if not self.words_number:
            return None
        return WordsFolder(folder / self.words_name, self.words_end, self.words_files)

    @property
    def words_name(self) -> str:
        """The name of the folder of the full-text index."""
        return f"words-{self.file_number}-{self.words_number}"

    def names(self, file: str) -> bool:
        """Tell whether a file of the index belongs to this state."""
        whole = file.removesuffix("-wal").removesuffix("-shm").removesuffix("-journal")
        return whole in (self.documents_name, self.vectors_name, self.words_name)


@dataclass
class Segment:
    """The description of up to `SEGMENT` rows of vectors.

    Attributes:
        owners: The number of the document of each row, or `GONE`: shape (n,).
        passages: Start and stop of each row's passage: shape (n, 2).
        vector_checksums: One for each block of vectors.
    """

    owners: Rows
    passages: Passages
    vector_checksums: npt.NDArray[np.uint32]

    def row(self) -> tuple[Any, ...]:
        """Return the values of `SEGMENT_COLUMNS`."""
        arrays = (self.owners, self.passages, self.vector_checksums)
        return tuple(np.ascontiguousarray(array).tobytes() for array in arrays)

    @classmethod
    def empty(cls) -> Segment:
        """Return a segment without rows."""
        return cls(np.empty(0, np.int64), np.empty((0, 2), np.int32), np.empty(0, np.uint32))

    @classmethod
    def of(cls, row: Sequence[Any]) -> Segment:
        """Make a segment of the values of `SEGMENT_COLUMNS`."""
        owners, passages, checksums = map(np.frombuffer, row, (np.int64, np.int32, np.uint32))
        return cls(owners, passages.reshape(-1, 2), checksums)


SEGMENT_COLUMNS = "owners, passages, vector_checksums FROM segments"


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of an array, without a copy if it is contiguous."""
    contiguous: Any = np.ascontiguousarray(array)
    return memoryview(contiguous).cast("B") if array.size else memoryview(b"")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index. Takes a millisecond.

    Raises:
        IndexFileError: The index is missing, damaged, or of another version.
    """
    with contextlib.closing(open_index(folder)) as database:
        return read_manifest_from(folder, database)


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than an index.

    Raises:
        IndexFileError: The folder holds something else, or is not a folder.
    """
    try:
        if not folder.exists() and not folder.is_symlink():
            return
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise unwritable(folder, error) from None
    are_ours = all(map(_OURS.fullmatch, names))
    is_index = DATABASE in names and not _is_of_another_program(folder / DATABASE)
    if (not are_ours and not is_index) or (names == [DATABASE] and not is_index):
        raise IndexFileError(
            f"'{folder}' holds {names[0]!r} and is not an index; name a new or an empty folder"
        )


def _is_of_another_program(path: Path) -> bool:
    """Tell whether a file is a SQLite database with another program's tables."""
    try:
        uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=0)) as database:
            names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    except sqlite3.Error:
        return False  # The database is empty, damaged or in use; the writer reports that.
    return bool(names) and "manifest" not in names


def is_busy(error: sqlite3.Error) -> bool:
    """Tell whether another connection is using the database."""
    return "lock" in str(error) or "busy" in str(error)


def is_part(name: str) -> bool:
    """Tell whether a file is a part of an index beside ``index.sqlite``."""
    return _PARTS.fullmatch(name) is not None


def read_manifest_from(folder: Path, database: sqlite3.Connection) -> Manifest:
    """Read the manifest of an open index; see `read_manifest`."""
    with reading_errors(folder / DATABASE):
        query = "SELECT 1 FROM sqlite_master WHERE name = 'manifest'"
        table = database.execute(query).fetchone()
        row = table and database.execute("SELECT value FROM manifest").fetchone()
        if not row:
            raise IndexFileError(f"there is no index in '{folder}'; {HOW_TO_CREATE}")
        manifest = json.loads(row[0])
        if manifest.get("version") != VERSION:
            raise IndexVersionError(
                f"'{folder}' has index version {manifest.get('version')}, but this program reads "
                f"version {VERSION}; use a matching rag-demo, or {HOW_TO_REBUILD} {folder} --yes"
            )
        return Manifest(**{**manifest, "model": ModelIdentity(**manifest["model"])})


def open_index(folder: Path) -> sqlite3.Connection:
    """Open ``index.sqlite`` and begin a transaction, which sees the index as it is now.

    Raises:
        IndexFileError: The index is missing, damaged or unreadable.
    """
    path = folder / DATABASE
    try:
        os.close(os.open(folder, os.O_RDONLY))  # Its errors are clearer than SQLite's.
        uri = readable_uri(path)
    except (FileNotFoundError, NotADirectoryError):
        raise IndexFileError(f"there is no index in '{folder}'; {HOW_TO_CREATE}") from None
    except OSError as error:
        raise damaged(path, error) from None
    with reading_errors(path):
        database = sqlite3.connect(uri, uri=True, timeout=5, isolation_level=None)
        database.execute("BEGIN")
        return database


def use_rollback_journal(connection: sqlite3.Connection) -> None:
    """Let a database be read by users that may not write it, and lie on a network volume.

    SQLite's log (WAL) needs memory that all readers can write.
    """
    connection.execute("PRAGMA journal_mode = DELETE")
    connection.execute("PRAGMA cache_spill = OFF")  # Readers wait for a commit only.


def readable_uri(path: Path) -> str:
    """Return the URI by which SQLite can read a database.

    Raises:
        OSError: The file is missing.
        IndexFileError: It is damaged or unreadable.
    """
    # Do not open the file here: closing it would drop SQLite's locks in this process.
    path.stat()
    # Who may write also undoes what a killed writer has left.
    way = "mode=rw" if os.access(path.parent, os.W_OK) and os.access(path, os.W_OK) else "mode=ro"
    uri = f"file:{quote(os.fsencode(path.resolve()))}?{way}"
    with reading_errors(path):
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5)) as database:
            database.execute("SELECT 1 FROM sqlite_master").fetchone()
        return uri


@contextlib.contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading a database into this package's."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if is_busy(error):
            raise UnreadableIndexError(f"'{path}' is being changed; try again") from None
        if _IS_TRANSIENT.search(str(error)):
            raise UnreadableIndexError(
                f"'{path}' cannot be read: {error}; check its permissions and try again"
            ) from None
        raise damaged(path, error) from None
    except sqlite3.ProgrammingError:
        raise  # A mistake of this program, such as a closed connection.
    except (sqlite3.Error, DamagedRowError, ValueError, TypeError, KeyError) as error:
        raise damaged(path, error) from None


@contextlib.contextmanager
def writing_errors(folder: Path) -> Iterator[None]:
    """Turn errors of writing an index into this package's."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if is_busy(error):
            raise WriterBusyError(
                f"another process is writing into '{folder}'; try again when it has finished"
            ) from None
        raise IndexFileError(
            f"the index cannot be written to '{folder}': {error}; "
            "free some space, or name another folder"
        ) from None
    except sqlite3.ProgrammingError:
        raise
    except (sqlite3.Error, DamagedRowError) as error:
        raise damaged(folder / DATABASE, error) from None
    except FileNotFoundError as error:
        if folder.exists() and error.filename:
            raise damaged(Path(str(error.filename)), "it is missing") from None
        raise unwritable(folder, error) from None
    except OSError as error:
        raise unwritable(folder, error) from None
