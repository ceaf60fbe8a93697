"""What describes a saved index, and how its folder, its files and its errors are named.

``index.sqlite`` holds documents, metadata, the words' index and which row of vectors belongs to
which document. ``vectors-N.f32`` holds the vectors, and ``scan-N.i8`` copies of them in int8 that
are faster to scan; both only grow. A transaction of the database says how much of them counts, so
a crash leaves at most bytes that nobody reads. Everything that is read has a checksum.
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
    AGAIN,
    MAKE_ONE,
    IndexFileError,
    NewerIndexError,
    UnreadableIndexError,
    WriterBusyError,
    damaged,
    unwritable,
)
from rag_demo.store.document_table import SCHEMA, DamagedRowError
from rag_demo.vectors import Rows, Vectors

__all__ = [
    "DATABASE",
    "GONE",
    "OUR_FILES",
    "SEGMENT",
    "SEGMENT_COLUMNS",
    "TABLES",
    "as_bytes",
    "IndexFacts",
    "Passages",
    "Segment",
    "checksum_of",
    "is_busy",
    "open_for_reading",
    "open_regular",
    "read_facts",
    "read_facts_of",
    "read_words",
    "reading_errors",
    "refuse_foreign_folder",
    "writing_errors",
]

DATABASE = "index.sqlite"
VERSION = 5
GONE = -1
"""The owner of a row whose document was deleted."""
SEGMENT = 1 << 12
"""Rows whose owners, passages and checksums stand in one row of the database."""
OUR_FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "vectors-*.f32", "scan-*.i8")
TABLES = (
    "CREATE TABLE facts (value TEXT, checksum INTEGER)",
    "CREATE TABLE segments (number INTEGER PRIMARY KEY, owners BLOB, passages BLOB,"
    " vector_checksums BLOB, scales BLOB, errors BLOB, scan_checksum INTEGER, checksum INTEGER)",
    "CREATE TABLE words (name TEXT PRIMARY KEY, content BLOB, checksum INTEGER)",
    *SCHEMA,
)

# What SQLite says of a disk, a quota or a permission: the database may be whole.
_IS_TRANSIENT = re.compile("unable to open|disk I/O|is full|readonly|interrupted|out of memory")

Passages = npt.NDArray[np.int32]


@dataclass(frozen=True)
class IndexFacts:
    """What describes a saved index.

    Attributes:
        model: Which embedding model made the vectors.
        source: What was indexed, as `rag_demo.ingest.ingest` was told.
        finished: Whether all of the source was.
        dimension: Of the vectors; 0 without vectors.
        rows: How many vectors count, those of deleted documents included.
        count: How many documents there are.
        next_number: The number of the next document.
        words_end: Documents with smaller numbers are in the words' index.
        generation: Grows with every change.
        files: The N in the names of the files.
        identity: Chosen by chance when an index is made from nothing.
        version: Of the format.
    """

    model: ModelIdentity
    source: str | None = None
    finished: bool = True
    dimension: int = 0
    rows: int = 0
    count: int = 0
    next_number: int = 0
    words_end: int = 0
    generation: int = 0
    files: int = 0
    identity: str = ""
    version: int = VERSION

    @property
    def vectors_name(self) -> str:
        """The name of the file of vectors."""
        return f"vectors-{self.files}.f32"

    @property
    def scan_name(self) -> str:
        """The name of the file of their int8 copies."""
        return f"scan-{self.files}.i8"


@dataclass
class Segment:
    """What is known of up to `SEGMENT` rows of vectors."""

    owners: Rows
    passages: Passages
    vector_checksums: npt.NDArray[np.uint32]
    scales: Vectors
    errors: Vectors
    scan_checksum: int = 0

    def row(self) -> tuple[Any, ...]:
        """Return what is stored: the values of `SEGMENT_COLUMNS`."""
        arrays = (self.owners, self.passages, self.vector_checksums, self.scales, self.errors)
        blobs = [np.ascontiguousarray(array).tobytes() for array in arrays]
        if not self.passages.any():
            blobs[1] = b""
        return (*blobs, self.scan_checksum, checksum_of(*blobs, self.scan_checksum))

    @classmethod
    def empty(cls) -> Segment:
        """Return one without rows."""
        none = np.empty(0, np.float32)
        return cls(np.empty(0, np.int64), np.empty((0, 2), np.int32), none.astype(np.uint32),
                   none, none)  # fmt: skip

    @classmethod
    def of(cls, row: Sequence[Any]) -> Segment:
        """Make it of what is stored; raises `DamagedRowError` if that is damaged."""
        *blobs, scan_checksum, checksum = row
        if checksum != checksum_of(*blobs, scan_checksum):
            raise DamagedRowError("the checksum of a segment is wrong")
        owners = np.frombuffer(blobs[0], np.int64)
        passages = np.frombuffer(blobs[1], np.int32).reshape(-1, 2)
        if not blobs[1]:
            passages = np.zeros((len(owners), 2), np.int32)
        checksums = np.frombuffer(blobs[2], np.uint32)
        scales, errors = (np.frombuffer(blob, np.float32) for blob in blobs[3:])
        return cls(owners, passages, checksums, scales, errors, scan_checksum)


SEGMENT_COLUMNS = (
    "owners, passages, vector_checksums, scales, errors, scan_checksum, checksum FROM segments"
)


def checksum_of(*parts: Any) -> int:
    """Return the CRC-32 of bytes, and of the spelling of anything else."""
    found = 0
    for part in parts:
        found = zlib.crc32(part if isinstance(part, bytes) else str(part).encode(), found)
    return found


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of an array; of a contiguous one its own."""
    contiguous: Any = np.ascontiguousarray(array)
    return memoryview(contiguous).cast("B") if array.size else memoryview(b"")


def read_facts(folder: Path) -> IndexFacts:
    """Read what describes an index; takes a millisecond.

    Raises:
        IndexFileError: The index is missing, damaged, or of another version.
    """
    database = open_for_reading(folder)
    try:
        with reading_errors(folder):
            return read_facts_of(folder, database)
    finally:
        database.close()


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than an index.

    Raises:
        IndexFileError: It does, or it is not a folder.
    """
    try:
        os.fsencode(folder)
        if "\0" in str(folder):
            raise ValueError("it holds the character 0")
        if not folder.exists() and not folder.is_symlink():
            return
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise unwritable(folder, error) from None
    except ValueError as error:
        raise IndexFileError(f"{str(folder)!r} is not a name of a folder: {error}") from None
    are_ours = all(any(fnmatch(name, each) for each in OUR_FILES) for name in names)
    is_index = DATABASE in names and not _is_of_another_program(folder / DATABASE)
    if (not are_ours and not is_index) or (names == [DATABASE] and not is_index):
        raise IndexFileError(
            f"'{folder}' holds {names[0]!r} and is not an index; name a new or an empty folder"
        )


def _is_of_another_program(path: Path) -> bool:
    """Whether it is a SQLite database with tables, none of which is ours."""
    try:
        uri = f"file:{quote(os.fsencode(path.resolve()))}?mode=ro"
        database = sqlite3.connect(uri, uri=True, timeout=0)
        try:
            names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        finally:
            database.close()
    except sqlite3.Error:
        return False  # It is empty, damaged or in use; the writer reports it.
    return bool(names) and "facts" not in names


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another connection is using the database."""
    return "lock" in str(error) or "busy" in str(error)


def read_words(database: sqlite3.Connection) -> dict[str, bytes]:
    """Return the files of the words' index by name; nothing if it has none that is whole."""
    rows = database.execute("SELECT name, content, checksum FROM words").fetchall()
    is_whole = all(checksum_of(name, content) == checksum for name, content, checksum in rows)
    return {name: content for name, content, _ in rows} if is_whole else {}


def read_facts_of(folder: Path, database: sqlite3.Connection) -> IndexFacts:
    """Read what describes the index of an open database; see `read_facts`."""
    path = folder / DATABASE
    with reading_errors(folder):
        tables = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone()
        row = tables and database.execute("SELECT value, checksum FROM facts").fetchone()
    if not row:
        raise IndexFileError(f"there is no index in '{folder}'; {MAKE_ONE}")
    value, checksum = row
    if not isinstance(value, str) or zlib.crc32(value.encode("utf-8", "replace")) != checksum:
        raise damaged(path, "its checksum is wrong")
    facts = json.loads(value)
    if facts.get("version") != VERSION:
        raise NewerIndexError(
            f"'{folder}' is an index of version {facts.get('version')}, and this program reads "
            f"version {VERSION}; update rag-demo, or {AGAIN} {folder} --yes"
        )
    return IndexFacts(**{**facts, "model": ModelIdentity(**facts["model"])})


def open_for_reading(folder: Path) -> sqlite3.Connection:
    """Open the database and begin a transaction, in which it stays what it is now."""
    path = folder / DATABASE
    try:
        # Never opened by itself: closing it would let go of SQLite's locks in this process.
        if not stat.S_ISREG(path.stat().st_mode):
            raise damaged(path, "it is not a regular file")
        os.close(os.open(folder, os.O_RDONLY))  # Says what is wrong where SQLite does not.
    except (FileNotFoundError, NotADirectoryError):
        raise IndexFileError(f"there is no index in '{folder}'; {MAKE_ONE}") from None
    except ValueError as error:
        raise IndexFileError(f"{str(folder)!r} is not a name of a folder: {error}") from None
    except OSError as error:
        raise damaged(path, error) from None
    with reading_errors(folder):
        # Read-only volumes and full ones have no room for the file that readers share.
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
            except BaseException:  # An interrupt too: nothing stays open.
                database.close()
                raise
    raise AssertionError("a way to open it has returned or raised")


def _has_log(path: Path) -> bool:
    try:
        return Path(f"{path}-wal").stat().st_size > 0
    except FileNotFoundError:  # The last connection removes it when it closes.
        return False


def open_regular(path: Path) -> int:
    """Open a file for reading, without waiting for a writer if it is a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise damaged(path, "it is not a regular file")


@contextlib.contextmanager
def reading_errors(folder: Path) -> Iterator[None]:
    """Turn what SQLite says of a database that is read into an error of this package."""
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
        raise  # Of this program, such as a connection that was closed.
    except (sqlite3.Error, DamagedRowError, ValueError, TypeError, KeyError) as error:
        raise damaged(path, error) from None


@contextlib.contextmanager
def writing_errors(folder: Path) -> Iterator[None]:
    """Turn errors of the system and of SQLite, while a folder is written, into this package's."""
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
