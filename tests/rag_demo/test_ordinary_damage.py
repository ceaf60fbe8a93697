"""Ordinary trouble of an index: a changed byte, a full disk, a read-only folder."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rag_demo import EmbeddingModel, PyTorchGPURetriever, RagDemoError
from support.rag_command import fail, info, succeed
from support.small_collections import Hashed

TEXTS = [f"text{number}" for number in range(1_500)]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    with contextlib.closing(PyTorchGPURetriever(Hashed())) as retriever:
        retriever.add(TEXTS, ids=TEXTS)
        retriever.save(tmp_path / "index")
    return tmp_path / "index"


@pytest.mark.parametrize("command", ["delete", "info", "verify"])
def test_command_removes_nothing_if_the_manifest_names_other_files(
    index: Path, command: str
) -> None:
    (database,) = index.glob("rag-demo-*.sqlite")
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        query = "UPDATE manifest SET value = json_set(value, '$.file_number', 3)"
        connection.execute(query)
    names = sorted(each.name for each in index.iterdir())
    assert "its manifest names files 3" in fail(command, index, *["text1"] * (command == "delete"))
    assert sorted(each.name for each in index.iterdir()) == names


def test_change_is_saved_if_space_cannot_be_reclaimed(
    index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise RagDemoError("no space left")

    monkeypatch.setattr("rag_demo.stores.index_writer.IndexWriter.clear", full)
    succeed("delete", index, *TEXTS[600:])
    assert "deleted texts still take space: no space left" in caplog.text
    assert info(index)["texts"] == 600
    monkeypatch.undo()
    succeed("verify", index)
    succeed("delete", index, TEXTS[0])
    assert info(index)["texts"] == 599


def test_words_of_a_folder_that_cannot_be_locked_are_copied(
    index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tantivy, read = pytest.importorskip("tantivy"), []
    succeed("delete", index, TEXTS[0])  # This makes the folder of words.
    assert list(index.glob("words-*"))

    def open_index(folder: str) -> Any:
        if Path(folder).is_relative_to(index):
            raise ValueError("Failed to acquire Lockfile")
        return tantivy.Index.open(folder)

    def words_of(text: str, **_: object) -> list[str]:
        read.append(text)
        return [text]

    make: Any = partial(tantivy.Index)
    make.open = open_index
    monkeypatch.setitem(sys.modules, "tantivy", SimpleNamespace(**{**vars(tantivy), "Index": make}))
    monkeypatch.setattr("rag_demo.stores.words.tokenize", words_of)
    with contextlib.closing(PyTorchGPURetriever(Hashed())) as retriever:
        retriever.load(index)
        (found,) = retriever.search("text7", 1, mode="bm25")
    assert found.id == "text7"
    assert read == ["text7"], "only the query is cut into words"
    succeed("verify", index)
    assert "damaged" not in caplog.text


def test_row_of_another_type_ends_the_cache_with_a_warning(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    with EmbeddingModel(tiny_model, device="cpu", cache=cache) as model:
        before = model.embed_documents(["paris"])
    with contextlib.closing(sqlite3.connect(cache)) as connection, connection:
        connection.execute("DROP TABLE embeddings")
        connection.execute("CREATE TABLE embeddings (key BLOB, vector)")
    with EmbeddingModel(tiny_model, device="cpu", cache=cache) as model:
        model.embed_documents(["paris"])
    with contextlib.closing(sqlite3.connect(cache)) as connection, connection:
        connection.execute("UPDATE embeddings SET vector = NULL")
    with EmbeddingModel(tiny_model, device="cpu", cache=cache) as model:
        assert np.array_equal(model.embed_documents(["paris"]), before)
    assert "is not used" in caplog.text


def test_snapshot_that_meets_another_one_is_one_line(index: Path, tmp_path: Path) -> None:
    snapshots = tmp_path / "snapshots"

    def meet(path: Path, target: Path) -> None:
        (target / "x").mkdir(parents=True)
        os.rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", meet)
        assert "000001" in fail("snapshot", index, "--to", snapshots)
    assert [each.name for each in snapshots.iterdir()] == ["000001"]
