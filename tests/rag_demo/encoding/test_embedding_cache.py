"""Embeddings on disk: the same bytes, one entry for each cause, and never in the way."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from programs import IMPORT_PATH
from rag_demo import EmbeddingModel
from rag_demo.encoding.embedding_cache import EmbeddingCache, make_key

TEXTS = ["the cache", "how do i give memory back", "paris", "", "the cache"]


def counted(model: EmbeddingModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the texts that a model really embeds."""
    model.load_model()
    seen: list[str] = []
    prepare = type(model._encoder).prepare

    def noting(self: Any, texts: Any, kind: str) -> Any:
        seen.extend(texts)
        return prepare(self, texts, kind)

    monkeypatch.setattr(type(model._encoder), "prepare", noting)
    return seen


def test_hits_are_the_same_bytes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second model finds what the first has stored, to the bit, and embeds the rest."""
    with EmbeddingModel(tiny_model, device="cpu", cache=tmp_path / "c.sqlite") as first:
        expected = first.embed_documents(TEXTS)
    with EmbeddingModel(tiny_model, device="cpu", cache=tmp_path / "c.sqlite") as second:
        seen = counted(second, monkeypatch)
        counts: list[int] = []
        vectors = second.embed_documents([*TEXTS, "new"], on_progress=counts.append)
        assert seen == ["new"]
        assert sum(counts) == 6
        assert vectors[:5].tobytes() == expected.tobytes()
        again = second.embed_documents(["new"])
        assert again.tobytes() == vectors[5:].tobytes()


def test_every_cause_has_its_own_entry(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another type, prompt or model is another vector."""
    keys = {
        make_key(model, dtype, kind, text)
        for model in (b"a", b"b")
        for dtype in ("float32", "bfloat16")
        for kind in ("query", "document")
        for text in ("x", "y", "")
    }
    assert len(keys) == 24
    cache = tmp_path / "c.sqlite"
    with EmbeddingModel(tiny_model, device="cpu", cache=cache) as model:
        model.embed_documents(["x"])
        seen = counted(model, monkeypatch)
        model.embed_queries(["x"])
        assert seen == ["x"]
    with EmbeddingModel(tiny_model, device="cpu", dtype="bfloat16", cache=cache) as model:
        model.embed_documents(["x"])
    assert seen == ["x", "x"]


def vectors(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)


def keys(count: int, start: int = 0) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in range(start, start + count)]


def test_bounded(tmp_path: Path) -> None:
    """What was not used for longest goes first."""
    cache = EmbeddingCache(tmp_path / "c.sqlite", max_bytes=100 * 32)
    for start in range(0, 90, 10):
        cache.put(keys(10, start), vectors(10, start))
    cache.get(keys(10), 8)
    cache.put(keys(30, 100), vectors(30))
    kept = set(cache.get([*keys(90), *keys(30, 100)], 8))
    assert len(kept) <= 100
    assert set(keys(30, 100)) <= kept
    assert not set(keys(10, 10)) & kept
    assert set(keys(10)) <= kept
    cache.close()


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_embedding_cache import keys, vectors
from rag_demo.encoding.embedding_cache import EmbeddingCache
cache = EmbeddingCache(Path(sys.argv[1]))
n = 0
while True:
    n += 1
    cache.put(keys(50, 1000 * n), vectors(50, 1000 * n))
    found = cache.get(keys(50, 1000 * n), 8)
    assert len(found) == 50
    if n == 1: print("ready", flush=True)
"""


def test_two_processes_and_kills(tmp_path: Path) -> None:
    """Writers that are killed leave whole transactions, and do not disturb each other."""
    path = tmp_path / "c.sqlite"
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    for round in range(2):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
            for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.1 + 0.1 * round)
        for writer in writers:
            writer.kill()
            _, said = writer.communicate()
            assert said == b""
    cache = EmbeddingCache(path)
    for n in range(1, 5):
        found = cache.get(keys(50, 1000 * n), 8)
        assert len(found) in (0, 50)
        for key, vector in found.items():
            position = int.from_bytes(key, "big") - 1000 * n
            assert np.array_equal(vector, vectors(50, 1000 * n)[position])
    assert len(cache.get(keys(50, 1000), 8)) == 50
    cache.close()


@pytest.mark.parametrize("damage", ["garbage", "folder", "newer"])
def test_damage_is_no_obstacle(tiny_model: Path, tmp_path: Path, damage: str) -> None:
    """A file that is none, cannot be opened, or is of another version: texts are embedded."""
    path = tmp_path / "c.sqlite"
    if damage == "garbage":
        path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    elif damage == "folder":
        path.mkdir()
    else:
        database = sqlite3.connect(path)
        database.execute("CREATE TABLE vectors (something TEXT)")
        database.execute("PRAGMA user_version = 99")
        database.commit()
        database.close()
    with EmbeddingModel(tiny_model, device="cpu", cache=path) as model:
        first = model.embed_documents(TEXTS)
        assert np.array_equal(model.embed_documents(TEXTS), first)


def test_after_a_fork(tmp_path: Path) -> None:
    """A child opens the file anew, and the parent goes on."""
    cache = EmbeddingCache(tmp_path / "c.sqlite")
    cache.put(keys(3), vectors(3))
    pid = os.fork()
    if pid == 0:
        cache.put(keys(3, 10), vectors(3))
        os._exit(len(cache.get(keys(3), 8)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert len(cache.get([*keys(3), *keys(3, 10)], 8)) == 6
    cache.close()
