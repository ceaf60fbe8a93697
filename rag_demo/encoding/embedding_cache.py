"""Embeddings on disk, by what made them: the model's files, the type, the prompt and the text.

One table of an SQLite file, which several processes may use at once and which survives being
killed. Each vector has a checksum, so what comes out is what went in.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from rag_demo.vectors import Vectors

__all__ = ["EmbeddingCache", "default_cache_path", "make_key"]

MAX_BYTES = 1 << 30
BUSY_S = 1.0  # what another process's lock is waited for
_APPLICATION = 0x72616764  # says that a database is ours: "ragd"
_VERSION = 3
_AT_ONCE = 500  # keys of one question
_TABLE = (
    "CREATE TABLE IF NOT EXISTS embeddings"
    " (id INTEGER PRIMARY KEY, key BLOB UNIQUE, vector BLOB, checksum INTEGER)"
)
_OF_PARENTS: list[object] = []  # connections, in a forked child

_Result = TypeVar("_Result")

log = logging.getLogger("rag_demo")


class EmbeddingCache:
    """Vectors by key; the oldest go when the file becomes too large.

    A kill loses nothing that was put; a power failure may. A cache that cannot be used is not
    used, and the log says so once: texts are embedded. A vector that is damaged is not returned; a
    damaged file is renamed to ``.damaged`` and begun anew; another program's is left alone.
    Threads may share it.

    Args:
        path: The file; it is made, with its folder.
        max_bytes: Of the file, about.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes must be positive, not {max_bytes}")
        self._path, self._max_bytes = path, max_bytes
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._pid = os.getpid()
        self._is_usable = True

    def get(self, keys: Sequence[bytes], dimension: int) -> dict[bytes, Vectors]:
        """Return the vectors that are there, by key."""

        def read(database: sqlite3.Connection) -> dict[bytes, Vectors]:
            found = {}
            for start in range(0, len(keys), _AT_ONCE):
                some = keys[start : start + _AT_ONCE]
                marks = ",".join("?" * len(some))
                question = f"SELECT key, vector, checksum FROM embeddings WHERE key IN ({marks})"
                for key, data, checksum in database.execute(question, some):
                    is_whole = isinstance(data, bytes) and len(data) == 4 * dimension
                    if is_whole and _checksum(key, data) == checksum:
                        found[key] = np.frombuffer(data, np.float32)
            return found

        return self._try(read) or {}

    def put(self, keys: Sequence[bytes], vectors: Vectors) -> None:
        """Store vectors: shape (n, d), float32."""
        rows = []
        for key, vector in zip(keys, vectors, strict=True):
            data = np.ascontiguousarray(vector, np.float32).tobytes()
            rows.append((key, data, _checksum(key, data)))

        def write(database: sqlite3.Connection) -> None:
            with database:  # All of it, or nothing if this is killed.
                database.execute("BEGIN IMMEDIATE")
                question = (
                    "INSERT OR REPLACE INTO embeddings (key, vector, checksum) VALUES (?,?,?)"
                )
                database.executemany(question, rows)
                (pages,) = database.execute("PRAGMA page_count").fetchone()
                (free,) = database.execute("PRAGMA freelist_count").fetchone()
                (page_bytes,) = database.execute("PRAGMA page_size").fetchone()
                if (pages - free) * page_bytes > self._max_bytes:
                    oldest = "SELECT id FROM embeddings ORDER BY id LIMIT MAX(?, 1 + (SELECT"
                    oldest += " COUNT(*) FROM embeddings) / 16)"
                    database.execute(f"DELETE FROM embeddings WHERE id IN ({oldest})", (len(rows),))

        self._try(write)

    def close(self) -> None:
        """Close the file; it is opened again when it is needed."""
        with self._lock:
            database, self._database = self._database, None
            if database is not None and self._pid == os.getpid():
                database.close()
            elif database is not None:  # Nor may it be collected, which closes it.
                _OF_PARENTS.append(database)

    def _try(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result | None:
        """Do something with the database; None if it cannot be used."""
        with self._lock:
            try:
                if not self._is_usable:
                    return None
                try:
                    return action(self._open())
                except sqlite3.OperationalError:
                    raise  # It is busy, full or read-only, and may be whole.
                except sqlite3.DatabaseError as error:
                    self._set_aside(error)
                    return action(self._open())
            except (sqlite3.Error, OSError) as error:
                log.warning("the embedding cache %s is not used: %s", self._path, error)
                self._is_usable = False
                return None

    def _open(self) -> sqlite3.Connection:
        if self._pid != os.getpid():
            # SQLite forbids to use, or to close, a connection of the parent process.
            _OF_PARENTS.append(self._database)
            self._database, self._pid = None, os.getpid()
        if self._database is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and not self._path.is_file():
                raise OSError("it is not a regular file")
            database = sqlite3.connect(
                self._path, timeout=BUSY_S, check_same_thread=False, isolation_level=None
            )
            try:
                (application,) = database.execute("PRAGMA application_id").fetchone()
                (version,) = database.execute("PRAGMA user_version").fetchone()
                if application not in (0, _APPLICATION) or version > _VERSION:
                    raise OSError("it is a newer version's, or another program's; move it away")
                if application == _APPLICATION and version < _VERSION:
                    raise sqlite3.DatabaseError("it is an earlier version's")
                is_empty = not database.execute("SELECT 1 FROM sqlite_master").fetchone()
                if application == 0 and not is_empty:
                    raise OSError("it is another program's; move it away")
                # Nothing waits for the disk: what a power failure damages is noticed.
                database.execute("PRAGMA synchronous = OFF")
                database.execute("PRAGMA journal_mode = WAL")
                if is_empty:  # All of it, or nothing if this is killed.
                    database.execute("BEGIN IMMEDIATE")
                    database.execute(_TABLE)
                    database.execute(f"PRAGMA application_id = {_APPLICATION}")
                    database.execute(f"PRAGMA user_version = {_VERSION}")
                    database.execute("COMMIT")
            except BaseException:  # Whatever it is, an interruption too: nothing stays open.
                database.close()
                raise
            self._database = database
        return self._database

    def _set_aside(self, error: sqlite3.Error) -> None:
        """Rename the file, to begin a new one."""
        if self._database is not None:
            self._database.close()
            self._database = None
        log.warning("the embedding cache %s begins anew: %s", self._path, error)
        self._path.replace(f"{self._path}.damaged")
        for suffix in ("-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)


def _checksum(key: bytes, data: bytes) -> int:
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
