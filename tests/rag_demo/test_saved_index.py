"""A saved index: it loads again, replaces only indexes, and reports damage."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from rag_demo import PyTorchGPURetriever, RagDemoError
from tests.rag_demo.durability.saves import Model
from tests.support.rag_command import rag_demo

TEXTS = ["one", "two\nlines\u2028", "three \U0001f600"]
METADATA: list[dict[str, Any]] = [{"n": 1}, {}, {"s": "\u00e9", "deep": [{"x": None}, 1.5, True]}]


class Retriever(PyTorchGPURetriever):
    def __init__(self, model: Any = None) -> None:
        super().__init__(model or Model(), device="cpu")


def save(folder: Path, texts: list[str] = TEXTS) -> Path:
    with Retriever() as retriever:
        retriever.add(texts, METADATA[: len(texts)], ids=list("abcdef")[: len(texts)])
        retriever.save(folder)
    return folder


def load(folder: Path, model: Any = None) -> list[str]:
    with Retriever(model) as retriever:
        retriever.load(folder)
        return sorted(each.text for each in retriever.search("x", top_k=10))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "index")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_empty_index_is_saved_and_loaded(tmp_path: Path) -> None:
    with Retriever() as retriever:
        retriever.save(tmp_path / "i")
    assert load(tmp_path / "i") == []


def test_folder_without_an_index_error_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty", "file"):
        with pytest.raises(RagDemoError, match=f"no index in .*{name}'; make one with"):
            load(tmp_path / name)


def test_folder_of_another_program_is_not_written(tmp_path: Path) -> None:
    """Files, or another program's database."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("do not touch")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "words-2024").write_text("do not touch")
    (tmp_path / "app").mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "app" / "index.sqlite")) as database:
        database.execute("CREATE TABLE bookmarks (name TEXT)")
    shutil.copytree(tmp_path / "app", tmp_path / "site")
    (tmp_path / "site" / "app.js").write_text("1")
    before = contents(tmp_path)
    for name in ("thesis", "thesis/thesis.txt", "words", "app", "site"):
        with pytest.raises(RagDemoError, match=name):
            save(tmp_path / name)
        assert rag_demo("index", __file__, "--out", tmp_path / name).returncode == 2
    assert contents(tmp_path) == before


def test_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    for umask, mode in ((0o022, 0o644), (0o027, 0o640), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            folder = save(tmp_path / str(mode))
        finally:
            os.umask(before)
        assert {stat.S_IMODE(path.stat().st_mode) for path in contents(folder)} == {mode}


def test_unreadable_index_is_not_called_damaged(folder: Path) -> None:
    """And no command replaces it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    load(folder)  # Everything is imported.
    kept = contents(folder)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(RagDemoError, match="Too many open files") as error:
            load(folder)
        assert rag_demo("index", __file__, "--out", folder).returncode == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "damaged" not in str(error.value)
    assert contents(folder) == kept
