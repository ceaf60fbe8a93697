"""A cache of embeddings on disk, by model, dtype, device, prompt and text.

It is one table of a SQLite file. Several processes may use it at once, also forked ones, and a
killed process does not damage it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rag_demo.database import Database
from rag_demo.vectors import Vectors

BUSY_S = 1.0  # how long to wait for another process's lock
_COLUMNS = "embeddings (key BLOB PRIMARY KEY, vector BLOB)"
_SELECT = "SELECT vector FROM embeddings WHERE key = ?"
_OTHERS = f"SELECT 1 FROM sqlite_master WHERE type = 'table' AND sql != 'CREATE TABLE {_COLUMNS}'"

log = logging.getLogger("rag_demo")


class EmbeddingCache:
    """Vectors by key, each with a checksum. Nothing is dropped; delete the file to begin again.

    If the cache cannot be used, for example because the file is damaged, one warning is logged and
    texts are embedded. Threads may share a cache.

    Args:
        path: The file. It is created with its folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database = Database(self._connect)
        self._is_usable = True

    def get(self, keys: Sequence[bytes], dimension: int) -> dict[bytes, Vectors]:
        """Return the stored vectors by key.

        Args:
            keys: The keys, see `make_key`.
            dimension: Length of the vectors.
        """
        found: dict[bytes, Vectors] = {}

        def read(connection: sqlite3.Connection) -> None:
            for key in keys:
                for (data,) in connection.execute(_SELECT, (key,)):
                    if len(data) == 4 * dimension + 4 and data == _sealed(key, data[:-4]):
                        vector = np.frombuffer(data[:-4], np.float32)
                        if np.isfinite(vector).all():
                            found[key] = vector

        self._try(read)
        return found

    def put(self, keys: Sequence[bytes], vectors: Vectors) -> None:
        """Store vectors, if they are finite.

        Args:
            keys: The keys, see `make_key`.
            vectors: Shape (n, d), float32.
        """
        pairs = zip(keys, vectors, strict=True)
        # A fault of a device must not stay.
        rows = [(k, _sealed(k, each.tobytes())) for k, each in pairs if np.isfinite(each).all()]

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany("INSERT OR REPLACE INTO embeddings VALUES (?, ?)", rows)

        self._try(write)

    def clear(self) -> None:
        """Remove all vectors, also from the file. They do not say of which text they are."""

        def remove(connection: sqlite3.Connection) -> None:
            with connection:
                connection.execute("DELETE FROM embeddings")
            connection.execute("VACUUM")

        self._try(remove)

    def close(self) -> None:
        """Close the file. It is opened again when it is needed."""
        self._database.close()

    def _try(self, action: Callable[[sqlite3.Connection], None]) -> None:
        """Call a function with the connection, unless the cache cannot be used."""
        try:
            if self._is_usable:
                with self._database.use() as connection:
                    action(connection)
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:  # The last two: damage.
            log.warning(
                "the embedding cache %s is not used: %s; remove it if it is damaged",
                self._path, error,
            )  # fmt: skip
            self._is_usable = False

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self._path, timeout=BUSY_S, check_same_thread=False)
        try:
            if connection.execute(_OTHERS).fetchone():
                raise OSError("another program or version wrote it; move it away")
            # With a log (WAL), what a forked child stores is lost when its parent closes the file.
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("PRAGMA synchronous = OFF")  # Each row has a checksum.
            connection.execute(f"CREATE TABLE IF NOT EXISTS {_COLUMNS}")
        except BaseException:  # An interrupt must not leave it open.
            connection.close()
            raise
        return connection


def _sealed(key: bytes, data: bytes) -> bytes:
    """Return a vector with a checksum at its end."""
    return data + zlib.crc32(data, zlib.crc32(key)).to_bytes(4, "little")


def make_key(*parts: str | int | None) -> bytes:
    """Return the key of one text: 16 bytes.

    Args:
        *parts: The text, and all that its vector depends on.
    """
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()


def default_cache_path() -> Path:
    """Return the commands' cache file, in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rag-demo" / "embeddings.sqlite"
