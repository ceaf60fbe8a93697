"""Embeddings on disk, by what made them: the model's files, the type, the prompt and the text.

One SQLite file, which several processes may use at once and which survives being killed. Vectors
are stored as their bytes, each with a checksum, so what comes out is what went in.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sqlite3
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from rag_demo.vectors import Vectors

__all__ = ["EmbeddingCache", "default_cache_path", "make_key"]

MAX_BYTES = 1 << 30
BUSY_S = 1.0  # what another process's lock is waited for
_PAUSE_S = 30.0  # before one that could not be used is tried again
_APPLICATION = 0x72616764  # says that a database is ours: "ragd"
_VERSION = 2
_ASKED = 500  # keys in one question
_REMEMBERED = 1 << 14  # uses that are noted before they are written
_EVICTED_AT_MOST = 4096  # in one go, so that no put takes longer than others
# Nothing waits for the disk: a kill loses nothing, and what a power failure damages is noticed.
_PRAGMAS = ("synchronous = OFF", "cache_size = -32000", "wal_autocheckpoint = 8000")
# What is read often is small and apart from the vectors, which lie in the order in which they
# came. So a put touches as many pages as it has rows, however many there are.
_TABLES = (
    "CREATE TABLE entries (key BLOB PRIMARY KEY, id INTEGER, crc INTEGER, bytes INTEGER,"
    " used INTEGER) WITHOUT ROWID",
    "CREATE INDEX by_use ON entries (used)",
    "CREATE TABLE vectors (id INTEGER PRIMARY KEY, vector BLOB)",
    "CREATE TABLE state (clock INTEGER, bytes INTEGER)",
    "INSERT INTO state VALUES (0, 0)",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {_VERSION}",
)
_NAMES = {"entries", "by_use", "vectors", "state"}
# What SQLite says when a file is whole but cannot be used now. All else is damage. An error of
# input or output is a quota, a limit of files' sizes, a cable: throwing the file away mends none.
_UNAVAILABLE = re.compile("lock|busy|full|readonly|unable to open|interrupted|disk I/O error")

_Result = TypeVar("_Result")

log = logging.getLogger("rag_demo")


_OF_PARENTS: list[object] = []  # connections, in a forked child


class EmbeddingCache:
    """Vectors by key; the least recently used go when it becomes too large.

    A kill loses nothing that was put; a power failure may. A cache that cannot be used is none:
    texts are embedded, and the log says so once. A row that is not what was stored is not
    returned, and stored again; a damaged file is renamed to ``.damaged`` and begun anew; another
    program's file is left alone. Threads may share it.

    Args:
        path: The file; it is made, with its folder.
        max_bytes: Of the vectors in it, about.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be positive, not {max_bytes}")
        self._path, self._max_bytes = path, max_bytes
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._inode = 0
        self._pid = os.getpid()
        self._used: dict[bytes, None] = {}
        self._paused_until_s = 0.0
        self._is_said = False

    def get(self, keys: Sequence[bytes], dimension: int) -> dict[bytes, Vectors]:
        """Return the vectors that are there, by key. Waits for nobody who only writes."""
        with self._lock:
            found = self._try(lambda database: _read(database, keys, 4 * dimension)) or {}
            self._used |= dict.fromkeys(found)
            if len(self._used) > _REMEMBERED:
                self._try(self._write_uses)
        return found

    def put(self, keys: Sequence[bytes], vectors: Vectors) -> None:
        """Store vectors: shape (n, d), float32."""
        rows = [
            (key, np.ascontiguousarray(vector, np.float32).tobytes())
            for key, vector in zip(keys, vectors, strict=True)
        ]
        with self._lock:
            self._try(lambda database: self._write(database, rows))

    def close(self) -> None:
        """Close the file; it is opened again when it is needed."""
        with self._lock:
            if self._database is not None and self._pid == os.getpid():
                if self._used:
                    self._try(self._write_uses)
                self._disconnect()
                self._database = None

    def _try(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result | None:
        """Do something with the database; None if it cannot be used."""
        if time.monotonic() < self._paused_until_s:
            return None
        try:
            try:
                return action(self._open())
            except sqlite3.Error as error:
                if _UNAVAILABLE.search(str(error)):
                    raise
                self._set_aside(error)
                return action(self._open())
        except (sqlite3.Error, OSError) as error:
            self._paused_until_s = time.monotonic() + _PAUSE_S
            level = logging.DEBUG if self._is_said else logging.WARNING
            log.log(level, "the embedding cache %s is not used: %s", self._path, error)
            self._is_said = True
            return None

    def _open(self) -> sqlite3.Connection:
        if self._pid != os.getpid():
            # A connection must not be carried across a fork, nor closed there: SQLite would take
            # the parent's file for one that nobody uses.
            _OF_PARENTS.append(self._database)
            self._database, self._pid = None, os.getpid()
        if self._database is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and not stat.S_ISREG(self._path.stat().st_mode):
                raise OSError("it is no regular file")
            database = sqlite3.connect(
                self._path, timeout=BUSY_S, check_same_thread=False, isolation_level=None
            )
            try:
                self._prepare(database)
                self._inode = self._path.stat().st_ino
            except BaseException:  # Whatever it is, an interruption too: nothing stays open.
                database.close()
                raise
            self._database = database
        if self._database.in_transaction:
            self._database.rollback()  # One that was interrupted where it could not say so.
        return self._database

    def _prepare(self, database: sqlite3.Connection) -> None:
        for pragma in _PRAGMAS:
            database.execute(f"PRAGMA {pragma}")
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if tables and (application, version) != (_APPLICATION, _VERSION):
            if application == 0 and version == 1 and {"vectors", "clock"} <= tables:
                raise sqlite3.DatabaseError("it is of the version before this one")
            if version == _VERSION and tables == _NAMES:
                raise sqlite3.DatabaseError("it does not say any more whose it is")
            raise OSError("it is a newer version's, or another program's; move it elsewhere")
        database.execute("PRAGMA journal_mode = WAL")
        if not tables:
            with _transaction(database):
                if not database.execute("SELECT name FROM sqlite_master").fetchone():
                    for statement in _TABLES:
                        database.execute(statement)

    def _set_aside(self, error: sqlite3.Error) -> None:
        """Make room for a new file, unless another process has done so already."""
        inode = self._inode if self._database is not None else None
        self._disconnect()
        if inode in (None, self._path.stat().st_ino):
            log.warning("the embedding cache %s begins anew: %s", self._path, error)
            self._path.replace(f"{self._path}.damaged")
            for suffix in ("-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)

    def _disconnect(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _write(self, database: sqlite3.Connection, rows: Sequence[tuple[bytes, bytes]]) -> None:
        with _transaction(database):  # All of it, or nothing if this is killed.
            self._note_uses(database)
            clock, size = database.execute("SELECT clock, bytes FROM state").fetchone()
            keys = list(dict(rows))
            size -= _delete(database, [row for part in _look_up(database, keys) for row in part])
            for key, data in dict(rows).items():
                number = database.execute("INSERT INTO vectors (vector) VALUES (?)", (data,))
                entry = (key, number.lastrowid, _crc(key, data), len(data), clock + 1)
                database.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", entry)
                size += len(data)
            size -= self._evict(database, size - self._max_bytes)
            database.execute("UPDATE state SET clock = ?, bytes = ?", (clock + 1, size))

    def _write_uses(self, database: sqlite3.Connection) -> None:
        with _transaction(database):
            self._note_uses(database)

    def _note_uses(self, database: sqlite3.Connection) -> None:
        """Say what was used since the last time; a read alone writes nothing."""
        if self._used:
            database.execute("UPDATE state SET clock = clock + 1")
            (clock,) = database.execute("SELECT clock FROM state").fetchone()
            (oldest,) = database.execute("SELECT MIN(used) FROM entries").fetchone()
            # What is among the latest anyhow stays where it is: that much exactness is worth a
            # page to write for each.
            old = clock - (clock - (oldest or 0)) // 8
            database.executemany(
                "UPDATE entries SET used = ? WHERE key = ? AND used < ?",
                [(clock, key, old) for key in self._used],
            )
            self._used.clear()

    def _evict(self, database: sqlite3.Connection, excess: int) -> int:
        """Delete what was not used for longest; return how many bytes that gives."""
        gone, freed = [], 0
        if excess > 0:
            oldest = "SELECT key, id, crc, bytes FROM entries ORDER BY used LIMIT ?"
            for row in database.execute(oldest, (_EVICTED_AT_MOST,)):
                if freed >= excess:
                    break
                gone.append(row)
                freed += row[3]
        return _delete(database, gone)


def _read(database: sqlite3.Connection, keys: Sequence[bytes], nbytes: int) -> dict[bytes, Vectors]:
    found = {}
    for rows in _look_up(database, keys):
        checksums = {number: (key, crc) for key, number, crc, _ in rows}
        marks = ",".join("?" * len(checksums))
        question = f"SELECT id, vector FROM vectors WHERE id IN ({marks})"
        for number, data in database.execute(question, list(checksums)):
            key, crc = checksums[number]
            # One that is damaged is embedded again, and stored in its place.
            if isinstance(data, bytes) and len(data) == nbytes and _crc(key, data) == crc:
                found[key] = np.frombuffer(data, np.float32)
    return found


_Entry = tuple[bytes, int, int, int]  # key, id, crc, bytes


def _look_up(database: sqlite3.Connection, keys: Sequence[bytes]) -> Iterator[list[_Entry]]:
    for start in range(0, len(keys), _ASKED):
        part = list(keys[start : start + _ASKED])
        marks = ",".join("?" * len(part))
        question = f"SELECT key, id, crc, bytes FROM entries WHERE key IN ({marks})"
        yield database.execute(question, part).fetchall()


def _delete(database: sqlite3.Connection, rows: Sequence[_Entry]) -> int:
    """Delete entries with their vectors; return how many bytes these had."""
    database.executemany("DELETE FROM entries WHERE key = ?", [(row[0],) for row in rows])
    database.executemany("DELETE FROM vectors WHERE id = ?", [(row[1],) for row in rows])
    return sum(row[3] for row in rows)


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:  # An interruption too leaves nothing half done.
        database.rollback()
        raise
    database.commit()


def _crc(key: bytes, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(key))


def make_key(model: bytes, dtype: str, kind: str, text: str) -> bytes:
    """Make the key of one text: 16 bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (model, dtype.encode(), kind.encode(), text.encode("utf-8", "surrogatepass")):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def default_cache_path() -> Path:
    """Return where the commands keep it: in the user's folder for caches."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rag-demo" / "embeddings.sqlite"
