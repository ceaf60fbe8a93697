"""A cache of embeddings on disk, by model, dtype, device, prompt and text.

It is one table of a SQLite file. Several processes may use it at once, and a killed process does
not damage it. Each vector has a checksum.
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

from rag_demo.database import Database
from rag_demo.vectors import Vectors

BUSY_S = 1.0  # how long to wait for another process's lock
_APPLICATION = 0x72616764  # "ragd", SQLite's application id of our file
_BATCH = 500  # keys of one statement
_TABLE = (
    "CREATE TABLE IF NOT EXISTS embeddings"
    " (id INTEGER PRIMARY KEY, key BLOB UNIQUE, vector BLOB, checksum INTEGER)"
)

_Result = TypeVar("_Result")

log = logging.getLogger("rag_demo")


class EmbeddingCache:
    """Vectors by key. Nothing is ever dropped; delete the file to begin again.

    A kill loses nothing that was stored; a power failure may. If the cache cannot be used, one
    warning is logged and texts are embedded. A damaged vector is not returned. A damaged file is
    renamed to ``.damaged`` and replaced; another program's database is left alone. Threads may
    share a cache.

    Args:
        path: The file. It is created with its folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._database = Database(self._connect)
        self._is_usable = True

    def get(self, keys: Sequence[bytes], dimension: int) -> dict[bytes, Vectors]:
        """Return the stored vectors by key.

        Args:
            keys: The keys, see `make_key`.
            dimension: Length of the vectors.
        """

        def read(connection: sqlite3.Connection) -> dict[bytes, Vectors]:
            found = {}
            for start in range(0, len(keys), _BATCH):
                batch = keys[start : start + _BATCH]
                marks = ",".join("?" * len(batch))
                query = f"SELECT key, vector, checksum FROM embeddings WHERE key IN ({marks})"
                for key, data, checksum in connection.execute(query, batch):
                    is_whole = isinstance(data, bytes) and len(data) == 4 * dimension
                    if is_whole and _checksum(key, data) == checksum:
                        found[key] = np.frombuffer(data, np.float32)
            return found

        return self._try(read) or {}

    def put(self, keys: Sequence[bytes], vectors: Vectors) -> None:
        """Store vectors.

        Args:
            keys: The keys, see `make_key`.
            vectors: Shape (n, d), float32.
        """
        rows = []
        for key, vector in zip(keys, vectors, strict=True):
            data = np.ascontiguousarray(vector, np.float32).tobytes()
            rows.append((key, data, _checksum(key, data)))

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                query = "INSERT OR REPLACE INTO embeddings (key, vector, checksum) VALUES (?,?,?)"
                connection.executemany(query, rows)

        self._try(write)

    def close(self) -> None:
        """Close the file. It is opened again when it is needed."""
        with self._lock:
            self._database.close()

    def _try(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result | None:
        """Call a function with the connection. Return None if the cache cannot be used."""
        with self._lock:
            if not self._is_usable:
                return None
            try:
                try:
                    return self._do(action)
                except sqlite3.OperationalError:
                    raise  # The file is busy, full or read-only, and may be intact.
                except sqlite3.DatabaseError as error:
                    self._replace_damaged(error)
                    return self._do(action)
            except (sqlite3.Error, OSError) as error:
                log.warning("the embedding cache %s is not used: %s", self._path, error)
                self._is_usable = False
                return None

    def _do(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        with self._database.use() as connection:
            return action(connection)

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self._path, timeout=BUSY_S, check_same_thread=False, isolation_level=None
        )
        try:
            is_empty = not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            if application != _APPLICATION and not is_empty:
                raise OSError("it is another program's database; move it away")
            # Nothing waits for the disk: checksums find what a power failure damages.
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA journal_mode = WAL")
            if is_empty:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(_TABLE)
                connection.execute(f"PRAGMA application_id = {_APPLICATION}")
                connection.execute("COMMIT")
        except BaseException:  # An interrupt must not leave it open.
            connection.close()
            raise
        return connection

    def _replace_damaged(self, error: sqlite3.Error) -> None:
        self._database.close()
        log.warning("the embedding cache %s is damaged and is replaced: %s", self._path, error)
        self._path.replace(f"{self._path}.damaged")
        for suffix in ("-wal", "-shm"):
            Path(f"{self._path}{suffix}").unlink(missing_ok=True)


def _checksum(key: bytes, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(key))


def make_key(model: bytes, dtype: str, kind: str, text: str) -> bytes:
    """Return the key of one text: 16 bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (model, dtype.encode(), kind.encode(), text.encode("utf-8", "surrogatepass")):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def default_cache_path() -> Path:
    """Return the commands' cache file, in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rag-demo" / "embeddings.sqlite"
