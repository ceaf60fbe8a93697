"""Tests of the release of faiss indexes."""

# Misuses things on purpose, and torch has no types for the attributes of modules.
# mypy: disable-error-code="index"

from __future__ import annotations

import sys
import threading
from typing import Any

import faiss
import numpy as np
import pytest

from support.programs import assert_clean, run_forked
from support.waiting import wait_for
from torch_utils import ReleasedError, memory_snapshot, release

VECTORS = np.random.default_rng(0).random((2000, 32), dtype=np.float32)
KINDS = ["Flat", "HNSW8", "IVF8,Flat", "SQ8", "IDMap,Flat", "LSH"]
SLOW = ["PQ8x4", "PCA8,IVF8,PQ8x4"]  # Their training takes longest.


def build(kind: str) -> Any:
    index = faiss.index_factory(32, kind)
    index.train(VECTORS)
    if kind.startswith("IDMap"):
        index.add_with_ids(VECTORS, np.arange(len(VECTORS)))
    else:
        index.add(VECTORS)
    return index


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)]
)
def test_every_use_after_release_is_an_error(kind: str) -> None:
    """For every kind of index and every use."""
    index = build(kind)
    report = release(index)
    assert not report.errors
    for use in (
        lambda: index.search(VECTORS[:1], 3),
        lambda: index.add(VECTORS),
        lambda: index.ntotal,
        lambda: faiss.write_index(index, "nowhere"),
        lambda: faiss.IndexIDMap(index),
    ):
        with pytest.raises((ReleasedError, TypeError)):
            use()
    assert release(index).freed_bytes == {}


def test_release_frees_the_vectors_and_counts_them() -> None:
    index = faiss.IndexFlatIP(256)
    index.add(np.ones((100_000, 256), dtype=np.float32))
    before = memory_snapshot().host.rss_bytes
    report = release(index)
    assert report.freed_bytes == {"host": 102_400_000}
    assert before - memory_snapshot().host.rss_bytes > 0.97 * 102_400_000


@pytest.mark.parametrize(
    ("kind", "size"), [("HNSW8", 128), ("PCA8,Flat", 32), ("PCA8,HNSW8", 32), ("IDMap,Flat", 128)]
)
def test_vectors_of_an_owned_inner_index_are_counted(kind: str, size: int) -> None:
    assert release(build(kind)).freed_bytes == {"host": size * len(VECTORS)}


def test_inner_index_owned_by_python_is_counted() -> None:
    """Unless a variable holds it as well."""
    rotated = faiss.IndexPreTransform(faiss.PCAMatrix(32, 8), faiss.IndexFlatL2(8))
    above = faiss.IndexIDMap(rotated)
    del rotated
    above.train(VECTORS)
    above.add_with_ids(VECTORS, np.arange(len(VECTORS)))
    assert release(above).freed_bytes == {"host": 32 * len(VECTORS)}


def test_inner_index_of_a_live_index_stays() -> None:
    below = faiss.IndexFlatIP(32)
    above = faiss.IndexIDMap(below)
    above.add_with_ids(VECTORS, np.arange(len(VECTORS)))
    (error,) = release(below).errors
    assert "another faiss index uses this IndexFlatIP" in str(error)
    assert below.ntotal == len(VECTORS)
    assert above.search(VECTORS[:1], 1)[0].shape == (1, 1)


def test_index_in_use_by_another_thread_stays() -> None:
    """It can be released afterwards."""
    index = faiss.IndexFlatIP(256)
    index.add(np.ones((60_000, 256), dtype=np.float32))
    queries = np.ones((2048, 256), dtype=np.float32)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(index.search(queries, 5)))
    thread.start()
    current_frames = sys._current_frames  # CPython's
    wait_for(lambda: "faiss" in current_frames()[thread.ident].f_code.co_filename)
    (error,) = release(index).errors
    assert "another thread is using this" in str(error)
    thread.join()
    assert found[0][0].shape == (2048, 5)
    assert release(index).freed_bytes == {"host": 4 * 256 * 60_000}


def test_borrowed_proxy_frees_no_memory() -> None:
    index = build("IVF8,Flat")
    part = faiss.downcast_index(index.quantizer)
    assert release(part).freed_bytes == {}
    assert index.search(VECTORS[:1], 1)[1][0][0] == 0


def test_program_exits_cleanly_after_release() -> None:
    program = """
    import faiss, numpy as np
    from torch_utils import release
    indexes = [faiss.index_factory(8, kind) for kind in ("Flat", "IDMap,Flat", "HNSW8")]
    assert not release(indexes).errors
    """
    assert_clean(run_forked(program))
