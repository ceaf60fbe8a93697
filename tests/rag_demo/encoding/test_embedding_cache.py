"""Embeddings on disk: the same bytes, one entry for each cause, and never in the way."""

from __future__ import annotations

import logging
import os
import resource
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
from rag_demo.encoding import embedding_cache
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


@pytest.mark.slow
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


def test_a_flipped_bit_is_a_miss_and_mended(tmp_path: Path) -> None:
    """What is not what was stored does not come back, and is stored again."""
    path = tmp_path / "c.sqlite"
    cache = EmbeddingCache(path)
    cache.put(keys(5), vectors(5))
    cache.close()
    content = bytearray(path.read_bytes())
    content[content.index(vectors(5)[3].tobytes()) + 7] ^= 1
    path.write_bytes(content)
    found = cache.get(keys(5), 8)
    assert set(found) == {key for n, key in enumerate(keys(5)) if n != 3}
    # The control: without the checksum it would have come back.
    with sqlite3.connect(path) as database:
        rows = database.execute("SELECT vector FROM vectors ORDER BY id").fetchall()
    assert rows[3][0] != vectors(5)[3].tobytes()
    database.close()
    cache.put(keys(5)[3:4], vectors(5)[3:4])
    found = cache.get(keys(5), 8)
    assert np.array_equal(np.stack([found[key] for key in keys(5)]), vectors(5))
    cache.close()


@pytest.mark.parametrize("garbage", [b"\x00", b"\x0d\x01\x5a"])
def test_damaged_pages(tmp_path: Path, garbage: bytes) -> None:
    """Whichever page is damaged: no wrong vector, no error, and after a put it works again."""
    cache = EmbeddingCache(tmp_path / "whole.sqlite")
    cache.put(keys(120), vectors(120))
    cache.close()
    content = (tmp_path / "whole.sqlite").read_bytes()
    set_aside = 0
    for page in range(len(content) // 4096):
        path = tmp_path / f"{page}.sqlite"
        start, stop = page * 4096, (page + 1) * 4096
        path.write_bytes(content[:start] + (garbage * 4096)[:4096] + content[stop:])
        cache = EmbeddingCache(path)
        for _ in range(2):
            found = cache.get(keys(120), 8)
            for row, key in enumerate(keys(120)):
                assert key not in found or np.array_equal(found[key], vectors(120)[row])
            cache.put(keys(120), vectors(120))
        assert len(cache.get(keys(120), 8)) == 120
        cache.close()
        set_aside += Path(f"{path}.damaged").exists()
    assert set_aside > 0


def test_a_lock_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process writes for hours: one line in the log, and reads go on."""
    assert embedding_cache.BUSY_S <= 1
    monkeypatch.setattr(embedding_cache, "BUSY_S", 0.01)
    cache = EmbeddingCache(tmp_path / "c.sqlite")
    cache.put(keys(3), vectors(3))
    with sqlite3.connect(tmp_path / "c.sqlite", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        assert len(cache.get(keys(3), 8)) == 3
        with caplog.at_level(logging.DEBUG, "rag_demo"):
            for n in range(100):
                cache.put(keys(3, 10 * n), vectors(3))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "is not used: database is locked" in caplog.text
        cache._paused_until_s = 0.0
        assert len(cache.get(keys(3), 8)) == 3
        other.rollback()
    other.close()
    cache.put(keys(3, 10), vectors(3))
    assert len(cache.get(keys(3, 10), 8)) == 3
    cache.close()


def steps(cache: EmbeddingCache, start: int) -> int:
    """Count what SQLite does, in steps of its own machine, to store 256 vectors."""
    database = cache._open()
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return 0

    database.set_progress_handler(step, 10)
    cache.put(keys(256, start), vectors(256))
    database.set_progress_handler(None, 0)
    return count


def test_a_put_does_not_grow_with_what_is_there(tmp_path: Path) -> None:
    """Neither before nor after there is too much; what summed up all rows did."""
    cache = EmbeddingCache(tmp_path / "c.sqlite", max_bytes=20_000 * 32)
    cache.put(keys(256), vectors(256))
    first = steps(cache, 1000)
    cache.put(keys(18_000, 10_000), vectors(18_000))
    assert steps(cache, 2000) < 1.5 * first
    for n in range(10):
        cache.put(keys(256, 50_000 + 1000 * n), vectors(256))
    evicting = steps(cache, 3000)
    assert evicting < 4 * first
    assert len(cache.get([*keys(256), *keys(256, 3000)], 8)) == 256
    database, count = cache._open(), 0

    def step() -> int:
        nonlocal count
        count += 1
        return 0

    database.set_progress_handler(step, 10)
    database.execute("SELECT SUM(LENGTH(vector)) FROM vectors").fetchone()
    assert count > 4 * first  # The control.
    database.set_progress_handler(None, 0)
    cache.close()


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    """It is not used, and not a byte of it changes."""
    path = tmp_path / "bookmarks.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE vectors (key BLOB, used INTEGER)")
    database.close()
    before = path.read_bytes()
    cache = EmbeddingCache(path)
    cache.put(keys(3), vectors(3))
    assert cache.get(keys(3), 8) == {}
    cache.close()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_file_of_the_version_before_begins_anew(tmp_path: Path) -> None:
    """It is set aside."""
    path = tmp_path / "c.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE vectors (key BLOB PRIMARY KEY, vector BLOB, used INTEGER)")
        database.execute("CREATE TABLE clock (n INTEGER)")
        database.execute("PRAGMA user_version = 1")
    database.close()
    cache = EmbeddingCache(path)
    cache.put(keys(3), vectors(3))
    assert len(cache.get(keys(3), 8)) == 3
    cache.close()
    assert Path(f"{path}.damaged").exists()


def test_a_flipped_bit_in_its_mark(tmp_path: Path) -> None:
    """A file with just our tables is ours, whatever its mark says; a newer version's is not."""
    for version, found in ((2, 3), (3, 0)):
        path = tmp_path / f"{version}.sqlite"
        cache = EmbeddingCache(path)
        cache.put(keys(3), vectors(3))
        cache.close()
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA application_id = 5")
            database.execute(f"PRAGMA user_version = {version}")
        database.close()
        cache.put(keys(3), vectors(3))
        assert len(cache.get(keys(3), 8)) == found
        cache.close()
        assert Path(f"{path}.damaged").exists() is bool(found)


def test_a_pipe_in_its_place(tmp_path: Path) -> None:
    """It is not opened, which could hang."""
    os.mkfifo(tmp_path / "c.sqlite")
    cache = EmbeddingCache(tmp_path / "c.sqlite")
    cache.put(keys(3), vectors(3))
    assert cache.get(keys(3), 8) == {}


def test_an_interrupted_put_leaves_nothing_and_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle: the rows are not there, and the next put works."""
    cache = EmbeddingCache(tmp_path / "c.sqlite")
    cache.put(keys(3), vectors(3))

    def interrupted(key: bytes, data: bytes) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(embedding_cache, "_crc", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.put(keys(3, 10), vectors(3))
    other = EmbeddingCache(tmp_path / "c.sqlite")
    other.put(keys(3, 20), vectors(3))
    assert len(cache.get([*keys(3), *keys(3, 10), *keys(3, 20)], 8)) == 6
    cache.close()
    other.close()


def test_an_error_of_the_disk_is_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be written any more, by a quota or a limit, is not thrown away for that."""
    path = tmp_path / "c.sqlite"
    cache = EmbeddingCache(path)
    cache.put(keys(100), vectors(100))
    cache.close()
    pid = os.fork()
    if pid == 0:
        most = path.stat().st_size // 2
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        cache.put(keys(100, 200), vectors(100))  # Python ignores SIGXFSZ.
        os._exit(0 if "is not used: disk I/O error" in caplog.text else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(cache.get(keys(100), 8)) == 100
    assert not Path(f"{path}.damaged").exists()
    cache.close()
