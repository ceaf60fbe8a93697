"""Embeddings on disk, by what made them: the model's files, the type, the prompt and the text.

One SQLite file, which several processes may use at once and which survives being killed; vectors
are stored as their bytes, so what comes out is what went in.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rag_demo.vectors import Vectors

__all__ = ["EmbeddingCache", "default_cache_path", "make_key"]

MAX_BYTES = 1 << 30
_VERSION = 1  # of the table; a file of another version is emptied
_BUSY_S = 10.0
_ASKED = 500  # keys in one question

log = logging.getLogger("rag_demo")


class EmbeddingCache:
    """Vectors by key; the least recently used go when it becomes too large.

    A cache that cannot be used is none: errors of the disk or of SQLite are logged at DEBUG,
    and texts are embedded. Threads may share it.

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
        self._pid = os.getpid()

    def get(self, keys: Sequence[bytes], dimension: int) -> dict[bytes, Vectors]:
        """Return the vectors that are there, by key."""
        found: dict[bytes, Vectors] = {}
        try:
            with self._lock:
                database = self._open()
                for start in range(0, len(keys), _ASKED):
                    part = list(keys[start : start + _ASKED])
                    marks = ",".join("?" * len(part))
                    rows = database.execute(
                        f"SELECT key, vector FROM vectors WHERE key IN ({marks})", part
                    ).fetchall()
                    for key, data in rows:
                        if len(data) == 4 * dimension:
                            found[key] = np.frombuffer(data, np.float32)
                with database:
                    database.executemany(
                        "UPDATE vectors SET used = (SELECT n FROM clock) WHERE key = ?",
                        [(key,) for key in found],
                    )
        except (sqlite3.Error, OSError) as error:
            log.debug("the embedding cache %s is not read: %s", self._path, error)
        return found

    def put(self, keys: Sequence[bytes], vectors: Vectors) -> None:
        """Store vectors: shape (n, d), float32."""
        try:
            with self._lock:
                database = self._open()
                with database:  # One transaction: all of it, or nothing if this is killed.
                    database.execute("UPDATE clock SET n = n + 1")
                    database.executemany(
                        "INSERT OR REPLACE INTO vectors VALUES (?, ?, (SELECT n FROM clock))",
                        [
                            (key, np.ascontiguousarray(vector, np.float32).tobytes())
                            for key, vector in zip(keys, vectors, strict=True)
                        ],
                    )
                    self._shrink(database)
        except (sqlite3.Error, OSError) as error:
            log.debug("the embedding cache %s is not written: %s", self._path, error)

    def close(self) -> None:
        """Close the file; it is opened again when it is needed."""
        with self._lock:
            database, self._database = self._database, None
            if database is not None and self._pid == os.getpid():
                database.close()

    def _open(self) -> sqlite3.Connection:
        if self._pid != os.getpid():  # A connection must not be carried across a fork.
            self._database, self._pid = None, os.getpid()
        if self._database is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self._path, timeout=_BUSY_S, check_same_thread=False)
            try:
                self._prepare(database)
            except sqlite3.DatabaseError as error:
                database.close()
                if isinstance(error, sqlite3.OperationalError):  # Locked, or a full disk.
                    raise
                log.debug("the embedding cache %s is damaged and begins anew", self._path)
                self._path.unlink()
                database = sqlite3.connect(self._path, timeout=_BUSY_S, check_same_thread=False)
                self._prepare(database)
            self._database = database
        return self._database

    def _prepare(self, database: sqlite3.Connection) -> None:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        with database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if version != _VERSION:
                database.execute("DROP TABLE IF EXISTS vectors")
                database.execute("DROP TABLE IF EXISTS clock")
                database.execute(
                    "CREATE TABLE vectors (key BLOB PRIMARY KEY, vector BLOB, used INTEGER)"
                )
                database.execute("CREATE INDEX by_use ON vectors (used)")
                database.execute("CREATE TABLE clock (n INTEGER)")
                database.execute("INSERT INTO clock VALUES (0)")
                database.execute(f"PRAGMA user_version = {_VERSION}")

    def _shrink(self, database: sqlite3.Connection) -> None:
        """Delete what was not used for longest, a tenth more than needed."""
        question = "SELECT COALESCE(SUM(LENGTH(vector)), 0) FROM vectors"
        (size,) = database.execute(question).fetchone()
        if size <= self._max_bytes:
            return
        (count,) = database.execute("SELECT COUNT(*) FROM vectors").fetchone()
        gone = int(count * (1 - 0.9 * self._max_bytes / size)) + 1
        database.execute(
            "DELETE FROM vectors WHERE key IN (SELECT key FROM vectors ORDER BY used LIMIT ?)",
            (gone,),
        )


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
