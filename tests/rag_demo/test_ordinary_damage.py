"""Ordinary trouble of an index: a changed byte, a full disk, a read-only folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rag_demo import EmbeddingModel, PyTorchGPURetriever, RagDemoError
from tests.support.rag_command import fail, info, succeed
from tests.support.small_collections import Hashed
from torch_utils import ResourceClosedError

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


@pytest.fixture
def indexed(tmp_path: Path) -> tuple[Path, Path]:
    """A source of two files, and the index that the command made of it."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("the lock of the dépôt", "utf-8")
    (source / "b.txt").write_text("another text", "utf-8")
    succeed("index", source, "--out", tmp_path / "made")
    return source, tmp_path / "made"


def test_changed_byte_in_a_text_is_damage_and_index_repairs_it(
    indexed: tuple[Path, Path],
) -> None:
    """The damaged text has a word of SQLite's message about writers."""
    source, folder = indexed
    (database,) = folder.glob("rag-demo-*.sqlite")
    content = bytearray(database.read_bytes())
    content[content.index("dépôt".encode()) + 1] = 0xFF
    database.write_bytes(content)
    assert "is damaged" in fail("search", folder, "lock", "--mode", "bm25")
    assert "is damaged" in fail("verify", folder)
    succeed("index", source, "--out", folder)
    succeed("verify", folder)
    assert info(folder)["texts"] == 2


def test_missing_folder_of_words_is_made_again(indexed: tuple[Path, Path], tmp_path: Path) -> None:
    _, folder = indexed
    (words,) = folder.glob("words-*")
    shutil.rmtree(words)
    assert "a.txt" in succeed("search", folder, "lock", "--mode", "bm25")
    assert "it is missing" in fail("verify", folder)
    (tmp_path / "c.txt").write_text("more")
    succeed("add", folder, tmp_path / "c.txt")
    succeed("verify", folder)


def test_vectors_of_a_killed_first_save_are_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    with contextlib.closing(PyTorchGPURetriever(Hashed())) as retriever:
        retriever.save(folder)
        (folder / "vectors-1.f32").write_bytes(b"rest" * 100)
        retriever.add(["text"], ids=["text"])
        retriever.save(folder)
    succeed("verify", folder)
    assert info(folder)["texts"] == 1


def test_close_does_not_wait_for_an_export_that_has_failed() -> None:
    retriever = PyTorchGPURetriever(Hashed())
    retriever.add(TEXTS)
    batches = retriever.store.batches()
    next(batches)
    retriever.close()
    with pytest.raises(ResourceClosedError):
        next(batches)
