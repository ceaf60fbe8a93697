"""Unit tests of the eviction from the embedding cache (private): no option sets its size."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rag_demo.encoding.embedding_cache import EmbeddingCache

VECTORS = np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32)


def keys(count: int, start: int = 0) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in range(start, start + count)]


def test_least_recently_used_vectors_go_first(tmp_path: Path) -> None:
    cache = EmbeddingCache(tmp_path / "c.sqlite", max_bytes=100 * VECTORS[0].nbytes)
    for start in range(0, 90, 10):
        cache.put(keys(10, start), VECTORS[:10])
    cache.get(keys(10), 8)
    cache.put(keys(30, 100), VECTORS)
    kept = set(cache.get([*keys(90), *keys(30, 100)], 8))
    assert len(kept) <= 100
    assert set(keys(30, 100)) <= kept
    assert not set(keys(10, 10)) & kept
    assert set(keys(10)) <= kept
    cache.close()
