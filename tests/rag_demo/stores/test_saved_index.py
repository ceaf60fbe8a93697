"""A saved index: what a save writes, which folders it refuses, and what it leaves alone."""

import contextlib
import itertools
import os
import shutil
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from rag_demo import IndexChangedError, ModelMismatchError, RagDemoError
from rag_demo.errors import WriterBusyError
from tests.support.rag_command import rag_demo, succeed
from tests.support.retriever_kinds import BOTH, OnCpu
from tests.support.small_collections import DIMENSION, Hashed


def save(folder: Path, *names: str) -> None:
    """Save texts, which are their own ids."""
    with OnCpu(Hashed()) as retriever:
        retriever.add(names, ids=names)
        retriever.save(folder)


def load(folder: Path) -> set[str]:
    with OnCpu(Hashed()) as retriever:
        retriever.load(folder)
        found = retriever.search("x", 1_000, mode="dense")
        assert len(found) == len(retriever)
        assert all(each.id == each.text for each in found)
        return {each.id for each in found}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_second_save_writes_only_the_changes(tmp_path: Path) -> None:
    folder, names = tmp_path / "index", [str(n) for n in range(100)]
    with OnCpu(Hashed()) as retriever:
        retriever.save(folder)
        assert load(folder) == set()
        retriever.add(names, ids=names)
        retriever.save(folder)
        (file,) = folder.glob("vectors-*.f32")
        before = file.stat()
        retriever.add(["new"], ids=["new"])
        retriever.delete(["3"])
        for _ in range(2):
            retriever.save(folder)
            after = file.stat()
            assert after.st_size == before.st_size + 4 * DIMENSION
            assert after.st_ino == before.st_ino
    assert load(folder) == {*names, "new"} - {"3"}


def test_changes_of_metadata_do_not_take_space_for_ever(tmp_path: Path) -> None:
    names, sizes = [str(n) for n in range(100)], []
    with OnCpu(Hashed()) as retriever:
        retriever.add(["a text"] * 100, ids=names)
        for number in range(30):
            retriever.update_metadata(names, [{"n": number}] * 100)
            retriever.save(tmp_path / "i")
            sizes.append(sum(file.stat().st_size for file in (tmp_path / "i").glob("*.sqlite")))
        assert max(sizes) < 4 * min(sizes)
        assert retriever.count({"n": 29}) == len(retriever.search("a text", 200)) == 100


def test_folder_without_an_index_error_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty", "file"):
        with pytest.raises(RagDemoError, match=f"no index in .*{name}'; make one with"):
            load(tmp_path / name)


def test_folder_of_another_program_is_not_written(tmp_path: Path) -> None:
    """Files, or another program's database."""
    for name in ("thesis/thesis.txt", "words/words-2024", "site/app.js"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("do not touch")
    (tmp_path / "app").mkdir()
    for name in ("app", "site"):
        with contextlib.closing(sqlite3.connect(tmp_path / name / "index.sqlite")) as database:
            database.execute("CREATE TABLE bookmarks (name TEXT)")
    before = contents(tmp_path)
    for name in ("thesis", "thesis/thesis.txt", "words", "app", "site"):
        with pytest.raises(RagDemoError, match=name):
            save(tmp_path / name, "a")
        assert rag_demo("index", __file__, "--out", tmp_path / name).returncode == 2
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_have_the_mode_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        save(tmp_path / "i", "a")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in contents(tmp_path)} == {mode}


def test_index_of_a_command_is_not_replaced_by_a_program(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "s.md").write_text("A text.")
    succeed("index", tmp_path / "s.md", "--out", tmp_path / "i", "--model", tiny_model)
    with OnCpu(Hashed()) as retriever:
        retriever.add(["new"])
        with pytest.raises(IndexChangedError):
            retriever.save(tmp_path / "i")
        retriever.save(tmp_path / "i", overwrite=True)


class Nameless(Hashed):
    """Models without a name, of one class; each has directions of its own."""

    name: Any = None

    def __init__(self, seed: str) -> None:
        self.seed = seed

    def embed_documents(self, texts: Any) -> Any:
        return super().embed_documents([self.seed + text for text in texts])


def test_models_of_one_class_without_a_name_are_told_apart(tmp_path: Path) -> None:
    one, same, other = (OnCpu(Nameless(seed)) for seed in ("a", "a", "bcd"))
    with one as retriever, same, other:
        retriever.add(["a", "bb"])
        retriever.save(tmp_path / "i")
        assert same.load(tmp_path / "i") == 2
        with pytest.raises(ModelMismatchError, match="Nameless"):
            other.load(tmp_path / "i")


@pytest.mark.parametrize("listing", range(1, 6))
def test_writer_removes_nothing_of_the_next(listing: int, tmp_path: Path, monkeypatch: Any) -> None:
    """It removes files under the lock only, and none that the committed state names.

    To remove files, it lists the folder. Another one tries to write at the Nth listing.
    """
    folder, listings = tmp_path / "i", itertools.count(1)
    save(folder, "a1", "a2")

    def write_at(usual: Any) -> Any:
        def listed(path: Any = ".") -> Any:
            if str(path) == str(folder) and next(listings) == listing:
                with contextlib.suppress(WriterBusyError):
                    save(folder, "c1", "c2", "c3")
            return usual(path)

        return listed

    with monkeypatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, write_at(getattr(os, name)))
        save(folder, "b1", "b2")
    assert load(folder) in ({"b1", "b2"}, {"c1", "c2", "c3"})
    assert "is whole" in succeed("verify", folder)


@BOTH
def test_index_made_again_under_a_retriever_is_not_mixed_into_it(kind: Any, tmp_path: Path) -> None:
    save(tmp_path / "a", "a1", "a2")
    with kind(Hashed()) as retriever:
        retriever.load(tmp_path / "a")
        shutil.rmtree(tmp_path / "a")
        save(tmp_path / "a", "b1", "b2")
        retriever.add(["a3"], ids=["a3"])
        with pytest.raises(IndexChangedError):
            retriever.save(tmp_path / "a")
        retriever.save(tmp_path / "b")
        for name in ("a1", "a2", "a3"):
            assert [each.text for each in retriever.search(name, 5, mode="bm25")] == [name]
    assert load(tmp_path / "b") == {"a1", "a2", "a3"}
