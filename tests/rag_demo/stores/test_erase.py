"""What is deleted is in the files for some time, and in none of them after it is erased."""

import contextlib
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import FaissRetriever, PyTorchGPURetriever
from tests.support.rag_command import fail, info, succeed, write_lines
from tests.support.small_collections import Hashed

SECRET = "Quorblix has the diagnosis K70"
KINDS = [PyTorchGPURetriever, pytest.param(FaissRetriever, marks=pytest.mark.slow)]


def traces(folder: Path, vector: Any = None) -> set[str]:
    """Return the files below a folder that have the word or the vector."""
    wanted = [b"quorblix"] if vector is None else [b"quorblix", vector.astype("<f4").tobytes()]
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.name
        for path in files
        if any(each in path.read_bytes().lower() or each in path.read_bytes() for each in wanted)
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


def test_compact_erases_what_was_deleted_before(index: Path) -> None:
    succeed("delete", index, "secret")
    assert traces(index)
    assert "compacted" in succeed("compact", index)
    assert traces(index) == set()
    assert "no index in" in fail("compact", index / "nowhere")


def test_snapshot_has_nothing_of_deleted_texts(index: Path, tmp_path: Path) -> None:
    succeed("delete", index, "secret")
    succeed("snapshot", index, "--to", tmp_path / "snapshots")
    assert traces(tmp_path / "snapshots") == set()
    assert info(tmp_path / "snapshots" / "latest")["texts"] == 20


@pytest.mark.parametrize("kind", KINDS)
def test_compact_in_python_saves_and_goes_on(kind: Any, tmp_path: Path) -> None:
    with kind(Hashed()) as retriever:
        retriever.add([f"text {n}" for n in range(50)], ids=[str(n) for n in range(50)])
        retriever.add([SECRET], ids=["secret"])
        vector = np.asarray(Hashed().embed_documents([SECRET]))[0]
        retriever.save(tmp_path / "i")
        retriever.delete(["secret"])
        retriever.compact(tmp_path / "i")
        assert traces(tmp_path / "i", vector) == set()
        assert len(retriever) == 50
        retriever.add(["one more"], ids=["more"])
        retriever.save(tmp_path / "i")  # It knows the index as its own.
        assert retriever.search("one more", 1)[0].id == "more"
    with kind(Hashed()) as other:
        assert other.load(tmp_path / "i", check=True) == 51


def test_compact_loses_nothing_that_another_thread_adds(tmp_path: Path) -> None:
    stop, added = threading.Event(), list[str]()

    def add() -> None:
        while not stop.is_set():
            added.extend(retriever.add(["text"], ids=[f"n{len(added)}"]))

    with PyTorchGPURetriever(Hashed()) as retriever:
        retriever.add(["first"], ids=["first"])
        thread = threading.Thread(target=add)
        thread.start()
        for _ in range(5):
            retriever.compact(tmp_path / "i")
        stop.set()
        thread.join()
        assert set(retriever.ids()) == {"first", *added}
