"""What a put and a get of the embedding cache take, as it grows to 600,000 rows and is full."""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results_file import write
from rag_demo.encoding.embedding_cache import EmbeddingCache
from torch_utils import measuring

ROWS, DIMENSION, ROUNDS = 256, 384, 40
SIZES = (0, 100_000, 300_000, 600_000)


def fill(cache: EmbeddingCache, count: int, vectors: Any) -> None:
    for _ in range(count // ROWS):
        cache.put([os.urandom(16) for _ in range(ROWS)], vectors)


def times(cache: EmbeddingCache, vectors: Any) -> dict[str, float]:
    """Medians and means, because a checkpoint of SQLite falls into one put of twenty."""
    puts: list[float] = []
    gets: list[float] = []
    for _ in range(ROUNDS):
        keys = [os.urandom(16) for _ in range(ROWS)]
        with measuring("cpu") as taken:
            cache.put(keys, vectors)
        puts += taken.host_s
        with measuring("cpu") as taken:
            found = cache.get(keys, DIMENSION)
        gets += taken.host_s
        assert len(found) == ROWS
    return {
        "put_s": statistics.median(puts),
        "put_mean_s": statistics.mean(puts),
        "get_s": statistics.median(gets),
    }


def main() -> None:
    vectors = np.random.default_rng(0).standard_normal((ROWS, DIMENSION)).astype(np.float32)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "c.sqlite")
        cache = EmbeddingCache(path)
        before = 0
        for size in SIZES:
            fill(cache, size - before, vectors)
            rows[f"{size}"] = times(cache, vectors)
            before = size + ROUNDS * ROWS
        cache.close()
        full = EmbeddingCache(path, max_bytes=4 * DIMENSION * SIZES[-1])
        rows["full"] = times(full, vectors)
        full.close()
    for what, row in rows.items():
        print(what, row)
    write("cache", {"rows": ROWS, "dimension": DIMENSION, "sizes": rows})


if __name__ == "__main__":
    main()
