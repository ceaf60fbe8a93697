"""The format of a saved index: its files, its manifest, and the errors of reading and writing.

``index.sqlite`` holds documents, metadata, the full-text index, and which row of vectors belongs
to which document. ``vectors-N.f32`` holds the vectors and only grows. Each transaction of the
database records how many of its rows count, so a crash leaves at most bytes that nobody reads.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import stat
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
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
from rag_demo.store.document_table import SCHEMA, DamagedRowError
from rag_demo.vectors import Rows

DATABASE = "index.sqlite"
VERSION = 2
GONE = -1
"""The owner of a row whose document was deleted."""
SEGMENT = 1 << 12
"""Rows of vectors that are described by one row of the table ``segments``."""
INDEX_FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "vectors-*.f32", "scan-*.i8")
TABLES = (
    "CREATE TABLE manifest (value TEXT, checksum INTEGER)",
    "CREATE TABLE segments (number INTEGER PRIMARY KEY, owners BLOB, passages BLOB,"
    " vector_checksums BLOB, checksum INTEGER)",
    "CREATE TABLE text_index (name TEXT PRIMARY KEY, content BLOB, checksum INTEGER)",
    *SCHEMA,
)

# SQLite's messages about a disk, a quota or a permission. The database may be intact.
_IS_TRANSIENT = re.compile("unable to open|disk I/O|is full|readonly|interrupted|out of memory")

Passages = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Manifest:
    """The description of a saved index.

    Attributes:
        model: The embedding model that made the vectors.
        source: The source that was indexed, as `rag_demo.ingest.ingest` got it.
        finished: Whether the whole source was indexed.
        dimension: Length of the vectors; 0 without vectors.
        rows: How many vectors count, including those of deleted documents.
        count: How many documents there are.
        next_number: The number of the next document.
        text_end: The full-text index has the documents with smaller numbers.
        generation: Grows with every change.
        file_number: The N in the names of the files.
        identity: A random string, chosen when the index is created.
        version: The version of the format.
    """

    model: ModelIdentity
    source: str | None = None
    finished: bool = True
    dimension: int = 0
    rows: int = 0
    count: int = 0
    next_number: int = 0
    text_end: int = 0
    generation: int = 0
    file_number: int = 0
    identity: str = ""
    version: int = VERSION

    @property
    def vectors_name(self) -> str:
        """The name of the file of vectors."""
        return f"vectors-{self.file_number}.f32"


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
        blobs = [np.ascontiguousarray(array).tobytes() for array in arrays]
        return (*blobs, checksum_of(*blobs))

    @classmethod
    def empty(cls) -> Segment:
        """Return a segment without rows."""
        return cls(np.empty(0, np.int64), np.empty((0, 2), np.int32), np.empty(0, np.uint32))

    @classmethod
    def of(cls, row: Sequence[Any]) -> Segment:
        """Make a segment of the values of `SEGMENT_COLUMNS`.

        Raises:
            DamagedRowError: The checksum is wrong.
        """
        *blobs, checksum = row
        if checksum != checksum_of(*blobs):
            raise DamagedRowError("the checksum of a segment is wrong")
        owners, passages, checksums = map(np.frombuffer, blobs, (np.int64, np.int32, np.uint32))
        return cls(owners, passages.reshape(-1, 2), checksums)


SEGMENT_COLUMNS = "owners, passages, vector_checksums, checksum FROM segments"


def checksum_of(*parts: Any) -> int:
    """Return the CRC-32 of bytes, and of other values written as text."""
    found = 0
    for part in parts:
        found = zlib.crc32(part if isinstance(part, bytes) else str(part).encode(), found)
    return found


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of an array, without a copy if it is contiguous."""
    contiguous: Any = np.ascontiguousarray(array)
    return memoryview(contiguous).cast("B") if array.size else memoryview(b"")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an index. Takes a millisecond.

    Raises:
        IndexFileError: The index is missing, damaged, or of another version.
    """
    with contextlib.closing(open_for_reading(folder)) as database:
        return read_manifest_from(folder, database)


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than an index.

    Raises:
        IndexFileError: The folder holds something else, or is not a folder.
    """
    try:
        os.fsencode(folder)
        if "\0" in str(folder):
            raise ValueError("it contains a null character")
        if not folder.exists() and not folder.is_symlink():
            return
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise unwritable(folder, error) from None
    except ValueError as error:
        raise IndexFileError(f"{str(folder)!r} cannot be the name of a folder: {error}") from None
    are_ours = all(any(fnmatch(name, each) for each in INDEX_FILES) for name in names)
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


def read_text_index(database: sqlite3.Connection) -> dict[str, bytes]:
    """Return the files of the full-text index by name, or nothing if one is damaged."""
    rows = database.execute("SELECT name, content, checksum FROM text_index").fetchall()
    is_whole = all(checksum_of(name, content) == checksum for name, content, checksum in rows)
    return {name: content for name, content, _ in rows} if is_whole else {}


def read_manifest_from(folder: Path, database: sqlite3.Connection) -> Manifest:
    """Read the manifest of an open index; see `read_manifest`."""
    with reading_errors(folder):
        query = "SELECT 1 FROM sqlite_master WHERE name = 'manifest'"
        table = database.execute(query).fetchone()
        row = table and database.execute("SELECT value, checksum FROM manifest").fetchone()
    if not row:
        raise IndexFileError(f"there is no index in '{folder}'; {HOW_TO_CREATE}")
    value, checksum = row
    if not isinstance(value, str) or checksum_of(value.encode("utf-8", "replace")) != checksum:
        raise damaged(folder / DATABASE, "the checksum of its manifest is wrong")
    manifest = json.loads(value)
    if manifest.get("version") != VERSION:
        raise IndexVersionError(
            f"'{folder}' has index version {manifest.get('version')}, but this program reads "
            f"version {VERSION}; use a matching rag-demo, or {HOW_TO_REBUILD} {folder} --yes"
        )
    return Manifest(**{**manifest, "model": ModelIdentity(**manifest["model"])})


def open_for_reading(folder: Path) -> sqlite3.Connection:
    """Open the database and begin a transaction, which sees the database as it is now.

    Raises:
        IndexFileError: The index is missing, damaged or unreadable.
    """
    path = folder / DATABASE
    try:
        # Do not open the file here: closing it would drop SQLite's locks in this process.
        if not stat.S_ISREG(path.stat().st_mode):
            raise damaged(path, "it is not a regular file")
        os.close(os.open(folder, os.O_RDONLY))  # Its errors are clearer than SQLite's.
    except (FileNotFoundError, NotADirectoryError):
        raise IndexFileError(f"there is no index in '{folder}'; {HOW_TO_CREATE}") from None
    except ValueError as error:
        raise IndexFileError(f"{str(folder)!r} cannot be the name of a folder: {error}") from None
    except OSError as error:
        raise damaged(path, error) from None
    with reading_errors(folder):
        # A read-only or full volume has no room for the file that readers share.
        ways = ["mode=rw", "mode=ro"] if os.access(folder, os.W_OK) else ["mode=ro"]
        if not _has_log(path):  # SQLite would ignore the changes in the log.
            ways.append("immutable=1")
        for way in ways:
            database = sqlite3.connect(
                f"file:{quote(os.fsencode(path.resolve()))}?{way}",
                uri=True,
                timeout=5,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                database.execute("PRAGMA query_only = ON")
                database.execute("BEGIN")
                database.execute("SELECT 1 FROM sqlite_master").fetchone()
                return database
            except sqlite3.OperationalError as error:
                database.close()
                if way == ways[-1] or is_busy(error):
                    raise
            except BaseException:  # An interrupt must not leave it open.
                database.close()
                raise
    raise AssertionError("the loop returns or raises")


def _has_log(path: Path) -> bool:
    try:
        return Path(f"{path}-wal").stat().st_size > 0
    except FileNotFoundError:  # The last connection removes it when it closes.
        return False


def open_regular(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor. Never waits for a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise damaged(path, "it is not a regular file")


@contextlib.contextmanager
def reading_errors(folder: Path) -> Iterator[None]:
    """Turn errors of reading the database into this package's."""
    path = folder / DATABASE
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
            f"the index cannot be written to '{folder}': {error}; free some space or change its "
            "permissions, or name another folder"
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
