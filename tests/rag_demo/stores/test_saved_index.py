"""A saved index: what a save writes, which folders it refuses, and what it leaves alone."""

import contextlib
import itertools
import os
import resource
import sqlite3
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import IndexChangedError, ModelMismatchError, RagDemoError
from rag_demo.errors import WriterBusyError
from tests.support.rag_command import info, rag_demo, succeed
from tests.support.retriever_kinds import BOTH, OnCpu
from tests.support.small_collections import DIMENSION, Hashed


def saved(folder: Path, *names: str, kind: Any = OnCpu) -> Any:
    """Return a retriever that has just saved texts, which are their own ids."""
    with contextlib.ExitStack() as stack:
        retriever = stack.enter_context(kind(Hashed()))
        retriever.add(names, ids=names)
        retriever.save(folder)
        stack.pop_all()
        return retriever


def texts_of(retriever: Any) -> dict[str, str]:
    return {each.id: each.text for each in retriever.search("x", 1_000, mode="dense")}


def load(folder: Path) -> dict[str, str]:
    with OnCpu(Hashed()) as retriever:
        count = retriever.load(folder)
        found = texts_of(retriever)
        assert len(found) == count
        return found


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@BOTH
def test_second_save_writes_only_the_changes(kind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    with kind(Hashed()) as retriever:
        retriever.save(folder)
        assert load(folder) == {}
        names = [str(n) for n in range(100)]
        retriever.add(names, ids=names)
        retriever.save(folder)
        (file,) = folder.glob("vectors-*.f32")
        before = file.stat()
        retriever.add(["golf golf"], ids=["new"])
        retriever.delete(["3"])
        for _ in range(2):
            retriever.save(folder)
            after = file.stat()
            assert after.st_size == before.st_size + 4 * DIMENSION
            assert after.st_ino == before.st_ino
        expected = retriever.search("golf", 200)
    with kind(Hashed()) as fresh:
        assert fresh.load(folder) == 100
        assert fresh.search("golf", 200) == expected
        assert "3" not in {each.id for each in expected}


def test_changes_of_metadata_do_not_take_space_for_ever(tmp_path: Path) -> None:
    names = [str(n) for n in range(100)]
    with OnCpu(Hashed()) as retriever:
        retriever.add(["a text"] * 100, ids=names)
        sizes = []
        for number in range(50):
            retriever.update_metadata(names, [{"n": number}] * 100)
            retriever.save(tmp_path / "i")
            sizes.append(sum(file.stat().st_size for file in (tmp_path / "i").glob("*.sqlite")))
        assert max(sizes[25:]) <= max(sizes[:25])
        assert retriever.count({"n": 49}) == len(retriever.search("a text", 200)) == 100


def test_folder_without_an_index_error_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty", "file"):
        with pytest.raises(RagDemoError, match=f"no index in .*{name}'; make one with"):
            load(tmp_path / name)


def test_folder_of_another_program_is_not_written(tmp_path: Path) -> None:
    """Files, or another program's database."""
    for name, file in (("thesis", "thesis.txt"), ("words", "words-2024"), ("site", "app.js")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("do not touch")
    (tmp_path / "app").mkdir()
    for name in ("app", "site"):
        with contextlib.closing(sqlite3.connect(tmp_path / name / "index.sqlite")) as database:
            database.execute("CREATE TABLE bookmarks (name TEXT)")
    before = contents(tmp_path)
    for name in ("thesis", "thesis/thesis.txt", "words", "app", "site"):
        with pytest.raises(RagDemoError, match=name):
            saved(tmp_path / name, "a")
        assert rag_demo("index", __file__, "--out", tmp_path / name).returncode == 2
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_have_the_mode_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        saved(tmp_path / "i", "a").close()
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


class Nameless:
    """Models without a name, of one class; each has directions of its own."""

    dimension = 8

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def embed_query(self, text: str) -> Any:
        return np.random.default_rng([self.seed, len(text)]).standard_normal(8)

    def embed_documents(self, texts: Any) -> Any:
        return np.stack([self.embed_query(text) for text in texts])


def test_models_of_one_class_without_a_name_are_told_apart(tmp_path: Path) -> None:
    with OnCpu(Nameless(1)) as retriever:
        retriever.add(["a", "bb"])
        retriever.save(tmp_path / "i")
    with OnCpu(Nameless(1)) as same, OnCpu(Nameless(2)) as other:
        assert same.load(tmp_path / "i") == 2
        with pytest.raises(ModelMismatchError, match="Nameless"):
            other.load(tmp_path / "i")


def test_unreadable_index_is_not_called_damaged(tmp_path: Path) -> None:
    """And no command replaces it."""
    folder = tmp_path / "i"
    saved(folder, "a").close()
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


def test_user_who_may_not_write_reads_beside_a_writer(tmp_path: Path) -> None:
    """Nor does a save of theirs change anything."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    folder = tmp_path / "i"
    saved(folder, *(f"t{n}" for n in range(61))).close()
    succeed("delete", folder, "t60")  # This makes the folder of words.
    before = contents(folder)
    assert any("words-" in str(path) for path in before)
    for each in (*folder.rglob("*"), folder):
        each.chmod(each.stat().st_mode & 0o555)
    for each in (tmp_path, *tmp_path.parents):
        each.chmod(each.stat().st_mode | 0o055)
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            with OnCpu(Hashed()) as retriever:
                assert retriever.load(folder) == 60
                assert len(retriever.search("t5", 9)) == 9
                retriever.add(["more"])
                retriever.save(folder)
        except RagDemoError as error:
            os._exit("cannot be written" not in str(error))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert contents(folder) == before


@pytest.mark.parametrize("listing", range(1, 6))
def test_writer_that_ends_removes_nothing_of_the_next_one(
    listing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes files under the lock only, and none that the committed state names.

    To remove files, it lists the folder. Another one tries to write at the Nth listing.
    """
    folder, listings = tmp_path / "i", itertools.count(1)
    saved(folder, "a1", "a2").close()

    def write_at(usual: Any) -> Any:
        def listed(path: Any = ".") -> Any:
            if str(path) == str(folder) and next(listings) == listing:
                with contextlib.suppress(WriterBusyError):
                    saved(folder, "c1", "c2", "c3").close()
            return usual(path)

        return listed

    with OnCpu(Hashed()) as retriever, monkeypatch.context() as patch:
        retriever.add(["b1", "b2"], ids=["b1", "b2"])
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, write_at(getattr(os, name)))
        retriever.save(folder)
    assert load(folder).keys() in ({"b1", "b2"}, {"c1", "c2", "c3"})
    assert "is whole" in succeed("verify", folder)


def test_vectors_of_a_killed_first_save_are_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "i"
    with OnCpu(Hashed()) as retriever:
        retriever.save(folder)
        (folder / "vectors-1.f32").write_bytes(b"rest" * 100)
        retriever.add(["text"], ids=["text"])
        retriever.save(folder)
    succeed("verify", folder)
    assert info(folder)["texts"] == 1
