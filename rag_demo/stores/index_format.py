"""The format of a saved index: its files, its manifest, and the errors of reading and writing.

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
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
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
_OLD = "index.sqlite"  # of version 2
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


def refuse_foreign_folder(folder: Path) -> list[str]:
    """Return the names in a folder, which must be empty or an index.

    Raises:
        IndexFileError: The folder holds something else.
    """
    names = [path.name for path in folder.iterdir()]
    if _OLD in names:
        raise _of_old_version(folder)
    foreign = [name for name in names if not is_part(name)]
    if foreign and not databases_of(names):
        raise IndexFileError(
            f"'{folder}' holds {foreign[0]!r} and is not an index; name a new or an empty folder"
        )
    return names


def _of_old_version(folder: Path) -> IndexVersionError:
    return IndexVersionError(
        f"'{folder}' holds {_OLD}, of an older version or another program; "
        f"remove the folder if it is an index, and {HOW_TO_REBUILD} {folder}"
    )


def reading(folder: Path, use: Callable[[sqlite3.Connection, Manifest], _Result]) -> _Result:
    """Call a function with the database and the manifest, in a transaction.

    It is called again if another process has replaced the files meanwhile.

    Raises:
        IndexFileError: The index is missing, damaged or unreadable.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _read(folder, use)
        except FileNotFoundError as error:
            if attempt == _ATTEMPTS - 1:
                raise damaged(Path(str(error.filename)), "it is missing") from None
        except OSError as error:
            raise damaged(Path(str(error.filename or folder)), error) from None
    raise AssertionError


def _read(folder: Path, use: Callable[[sqlite3.Connection, Manifest], _Result]) -> _Result:
    missing = IndexFileError(f"there is no index in '{folder}'; {HOW_TO_CREATE}")
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        raise missing from None
    if _OLD in names:
        raise _of_old_version(folder)
    for number in databases_of(names):
        path = folder / database_name(number)
        uri = readable_uri(path)
        with reading_errors(path):
            database = sqlite3.connect(uri, uri=True, timeout=5, isolation_level=None)
        with contextlib.closing(database):
            with reading_errors(path):
                database.execute("BEGIN")
            manifest = read_manifest_from(path, database)
            if manifest is not None:
                return use(database, manifest)
    raise missing


def read_manifest_from(path: Path, database: sqlite3.Connection) -> Manifest | None:
    """Read the manifest of an open database; None if nothing was committed."""
    with reading_errors(path):
        query = "SELECT 1 FROM sqlite_master WHERE name = 'manifest'"
        table = database.execute(query).fetchone()
        row = table and database.execute("SELECT value FROM manifest").fetchone()
        if not row:
            return None
        manifest = json.loads(row[0])
        if manifest.get("version") != VERSION:
            raise IndexVersionError(
                f"'{path}' has index version {manifest.get('version')}, but this program reads "
                f"version {VERSION}; use a matching rag-demo, or {HOW_TO_REBUILD} {path.parent} "
                "--yes"
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


def _is_busy(error: sqlite3.Error) -> bool:
    return "lock" in str(error) or "busy" in str(error)


@contextlib.contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """Turn errors of reading a database into this package's."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if _is_busy(error):
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
        if _is_busy(error):
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
        raise damaged(folder, error) from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and folder.exists() and error.filename:
            raise damaged(Path(str(error.filename)), "it is missing") from None
        raise unwritable(folder, error) from None
