"""What is deleted is in the files for some time, and in none of them after it is erased."""

import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.rag_command import fail, info, succeed, write_lines
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import DIMENSION, Hashed
from tests.support.threads import errors_in_threads

SECRET = "Quorblix has the diagnosis K70"


def traces(folder: Path, vector: Any = None) -> set[str]:
    """Return the files below a folder that have the word or the vector."""
    wanted = b"quorblix" if vector is None else vector.astype("<f4").tobytes()
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {
        path.name
        for path, content in files.items()
        if b"quorblix" in content.lower() or wanted in content
    }


@pytest.fixture
def index(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    records = [{"id": str(n), "text": f"text {n}"} for n in range(20)]
    write_lines(tmp_path / "s.jsonl", [*records, {"id": "secret", "text": SECRET}])
    model = ("--model", tiny_model, "--device", "cpu")
    succeed("index", tmp_path / "s.jsonl", "--out", tmp_path / "i", *model)
    return tmp_path / "i"


def test_delete_with_erase_leaves_no_byte(index: Path, tmp_path: Path) -> None:
    """Of the text, its words and its vector; and the cache of embeddings is empty."""
    vector = np.fromfile(index / "vectors-1.f32", "<f4")[-info(index)["dimension"] :]
    assert traces(index, vector) >= {"rag-demo-1.sqlite", "vectors-1.f32"}
    assert "20 remain" in succeed("delete", index, "secret", "--erase")
    assert traces(index, vector) == set()
    with contextlib.closing(sqlite3.connect(tmp_path / "cache/rag-demo/embeddings.sqlite")) as one:
        assert one.execute("SELECT count(*) FROM embeddings").fetchone() == (0,)
    assert "20 texts" in succeed("verify", index)
    assert info(index)["source"].endswith("s.jsonl")
    assert "text 7" in succeed("search", index, "text 7", "--mode", "bm25")


def test_compact_erases_what_was_deleted_before(index: Path, tmp_path: Path) -> None:
    """A snapshot has nothing of it even before."""
    succeed("delete", index, "secret")
    succeed("snapshot", index, "--to", tmp_path / "snapshots")
    assert info(tmp_path / "snapshots" / "latest")["texts"] == 20
    assert traces(index) and not traces(tmp_path / "snapshots")
    assert "compacted" in succeed("compact", index)
    assert not traces(index)
    assert "no index in" in fail("compact", index / "nowhere")


def test_compact_in_python_saves_and_goes_on(tmp_path: Path) -> None:
    with OnCpu(Hashed()) as retriever, OnCpu(Hashed()) as other:
        retriever.add([f"text {n}" for n in range(50)])
        retriever.add([SECRET], ids=["secret"])
        retriever.save(tmp_path / "i")
        vector = np.fromfile(tmp_path / "i" / "vectors-1.f32", "<f4")[-DIMENSION:]
        retriever.delete(["secret"])
        retriever.compact(tmp_path / "i")
        assert not traces(tmp_path / "i", vector)
        assert len(retriever) == 50
        retriever.add(["one more"], ids=["more"])
        retriever.save(tmp_path / "i")  # It knows the index as its own.
        assert retriever.search("one more", 1)[0].id == "more"
        assert other.load(tmp_path / "i", check=True) == 51


def test_compact_loses_nothing_that_another_thread_adds(tmp_path: Path) -> None:
    compacted, added = threading.Event(), list[str]()
    with OnCpu(Hashed()) as retriever:

        def add() -> None:
            while not compacted.is_set():
                added.extend(retriever.add(["text"], ids=[f"n{len(added)}"]))

        def compact() -> None:
            try:
                for _ in range(5):
                    retriever.compact(tmp_path / "i")
            finally:
                compacted.set()

        assert errors_in_threads(add, compact) == []
        assert set(retriever.ids()) == set(added)
