"""Faults of the store that reviews found; each once gave a wrong result."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import (
    FaissRetriever,
    IndexChangedError,
    ModelMismatchError,
    PyTorchGPURetriever,
    RagDemoError,
)
from tests.support.rag_command import documents, fail, info, rag_demo, succeed, write_lines
from tests.support.small_collections import Hashed
from torch_utils import ResourceClosedError

KINDS = [PyTorchGPURetriever, FaissRetriever]


def saved(folder: Path, *texts: str, kind: Any = PyTorchGPURetriever) -> Any:
    retriever = kind(Hashed())
    retriever.add(texts, ids=texts)
    retriever.save(folder)
    return retriever


def ids(retriever: Any, query: str = "x", **options: Any) -> set[str]:
    return {result.id for result in retriever.search(query, 1_000, **options)}


def vectors_file(folder: Path) -> Path:
    (found,) = folder.glob("vectors-*.f32")
    return found


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_change_does_not_hide_damaged_vectors(tmp_path: Path) -> None:
    retriever = saved(tmp_path / "i", *map(str, range(40)))
    flip(vectors_file(tmp_path / "i"), 35 * 32)
    retriever.add(["more"])
    retriever.save(tmp_path / "i")
    retriever.close()
    assert "vectors-1.f32' is damaged" in fail("verify", tmp_path / "i")


def test_change_does_not_recreate_missing_vectors(tmp_path: Path) -> None:
    saved(tmp_path / "i", *map(str, range(100))).close()
    vectors_file(tmp_path / "i").unlink()
    done = rag_demo("delete", tmp_path / "i", *map(str, range(40)))
    assert done.returncode == 2, str(done)
    assert "vectors-1.f32' is damaged" in done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_save_notices_an_index_that_only_looks_the_same(kind: Any, tmp_path: Path) -> None:
    first = saved(tmp_path / "i", "a1", "a2", kind=kind)
    shutil.rmtree(tmp_path / "i")
    saved(tmp_path / "i", "b1", "b2", kind=kind).close()
    first.add(["a3"], ids=["a3"])
    with pytest.raises(IndexChangedError):
        first.save(tmp_path / "i")
    first.save(tmp_path / "i", overwrite=True)
    first.close()
    with kind(Hashed()) as loaded:
        loaded.load(tmp_path / "i")
        assert ids(loaded) == {"a1", "a2", "a3"}


@pytest.mark.parametrize("kind", KINDS)
def test_index_made_again_under_a_retriever_is_not_mixed_into_it(kind: Any, tmp_path: Path) -> None:
    saved(tmp_path / "a", "a1", "a2", kind=kind).close()
    with kind(Hashed()) as retriever:
        retriever.load(tmp_path / "a")
        retriever.save(tmp_path / "b")
        shutil.rmtree(tmp_path / "a")
        saved(tmp_path / "a", "b1", "b2", kind=kind).close()
        retriever.add(["a3"], ids=["a3"])
        retriever.save(tmp_path / "b")
        for mode in ("dense", "bm25"):
            found = [each for text in ("a1", "a2", "a3")
                     for each in retriever.search(text, 5, mode=mode)]  # fmt: skip
            assert all(each.id == each.text for each in found), mode
            assert {each.id for each in found} == {"a1", "a2", "a3"}, mode
        retriever.save(tmp_path / "c")
    with kind(Hashed()) as loaded:
        loaded.load(tmp_path / "c")
        assert {each.id: each.text for each in loaded.search("x", 9)} == {
            name: name for name in ("a1", "a2", "a3")
        }


LISTINGS: dict[str, Any] = {}


def while_listing(event: str, arguments: Any) -> None:
    """Call a function when a folder is listed for the Nth time, as what removes files does."""
    if event in ("os.listdir", "os.scandir") and str(arguments[0]) == LISTINGS.get("folder"):
        LISTINGS["left"] -= 1
        if not LISTINGS["left"]:
            LISTINGS.pop("folder")
            LISTINGS.pop("call")()


@pytest.fixture(scope="module")
def hooked() -> None:
    sys.addaudithook(while_listing)


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("listing", range(1, 5))
def test_writer_that_ends_removes_nothing_of_the_next_one(listing: int, tmp_path: Path) -> None:
    """It removes files under the lock only, and none that the committed state names."""
    folder, refused = tmp_path / "i", list[str]()
    saved(folder, "a1", "a2").close()

    def commit_another() -> None:
        with PyTorchGPURetriever(Hashed(), device="cpu") as other:
            other.add(["c1", "c2", "c3"], ids=["c1", "c2", "c3"])
            try:
                other.save(folder)
            except RagDemoError as error:
                refused.append(str(error))

    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["b1", "b2"], ids=["b1", "b2"])
        LISTINGS.update(folder=str(folder), left=listing, call=commit_another)
        retriever.save(folder)
        LISTINGS.clear()
    with PyTorchGPURetriever(Hashed(), device="cpu") as loaded:
        assert loaded.load(folder) in (2, 3)
        assert ids(loaded) in ({"b1", "b2"}, {"c1", "c2", "c3"})
        assert not refused or "another process is writing" in refused[0]
    assert "is whole" in succeed("verify", folder)


def test_damaged_index_loses_no_text_and_its_source_makes_it_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Neither `add` nor another source replaces it."""
    source, more, folder = tmp_path / "s.jsonl", tmp_path / "more.jsonl", tmp_path / "i"
    write_lines(source, [{"id": str(n), "text": f"text {n}"} for n in range(40)])
    write_lines(more, [{"id": "more", "text": "one more"}])
    options = ("--out", folder, "--model", tiny_model)
    succeed("index", source, *options)
    flip(vectors_file(folder), 100)
    for command in (("add", folder, more), ("index", more, *options)):
        assert "damaged" in fail(*command)
        assert info(folder)["texts"] == 40
    succeed("index", source, *options)
    succeed("add", folder, more)
    assert info(folder)["texts"] == 41
    flip(vectors_file(folder), 100)
    succeed("index", more, *options, "--yes")
    assert info(folder)["texts"] == 1


def test_integers_beyond_float_keep_their_sign() -> None:
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["x"], [{"n": -(10**400)}])
        assert ids(retriever, where={"n": {"$lt": 0}})
        assert not ids(retriever, where={"n": {"$gt": 0}})


def test_metadata_change_from_one_to_true_is_saved(tiny_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "s.jsonl"
    for value in (1, True):
        write_lines(source, [{"id": "a", "text": "some words", "f": value}])
        succeed("index", source, "--out", tmp_path / "i", "--model", tiny_model)
    assert documents(tmp_path / "i")["a"]["metadata"]["f"] is True


def test_result_that_words_have_found_has_its_passage() -> None:
    long = "A sentence about nothing at all. " * 60 + "The port is 8443. " + "More of it. " * 120
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add([long, "short"], ids=["long", "short"])
        (found,) = retriever.search("port 8443", mode="bm25")
        assert found.passage is not None
        start, stop = found.passage
        assert "8443" in long[start:stop] and stop - start < 1_000


def test_more_excluded_values_than_sqlite_takes() -> None:
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["a", "b"], [{"n": 1}, {"n": 70_000}], ["a", "b"])
        assert ids(retriever, where={"n": {"$nin": list(range(60_000))}}) == {"b"}


def test_wrong_filter_is_an_error_in_an_empty_retriever() -> None:
    with (
        PyTorchGPURetriever(Hashed(), device="cpu") as retriever,
        pytest.raises(ValueError, match="regex"),
    ):
        retriever.search("x", where={"n": {"$regex": "a"}})


def test_empty_database_beside_vectors_is_damage(tmp_path: Path) -> None:
    saved(tmp_path / "i", *(f"t{n}" for n in range(60))).close()
    before = {path.name for path in (tmp_path / "i").iterdir()}
    (tmp_path / "i" / "rag-demo-1.sqlite").write_bytes(b"")
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["new"], ids=["n"])
        with pytest.raises(RagDemoError, match="damaged"):
            retriever.save(tmp_path / "i")
        assert {path.name for path in (tmp_path / "i").iterdir()} == before
        retriever.save(tmp_path / "i", overwrite=True)
    assert "is whole" in succeed("verify", tmp_path / "i")


def test_index_of_a_command_is_not_replaced_by_a_program(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "s.md").write_text("A text.")
    succeed("index", tmp_path / "s.md", "--out", tmp_path / "i", "--model", tiny_model)
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["new"])
        with pytest.raises(IndexChangedError):
            retriever.save(tmp_path / "i")
        retriever.save(tmp_path / "i", overwrite=True)


def test_search_that_waits_for_its_model_sees_the_close(tmp_path: Path) -> None:
    """It gets an error, or an answer, and never reads what was closed."""
    inside, may_go_on = threading.Event(), threading.Event()

    class Slow(Hashed):
        def embed_query(self, text: str) -> Any:
            inside.set()
            assert may_go_on.wait(60)
            return super().embed_query(text)

    retriever = PyTorchGPURetriever(Slow(), device="cpu")
    retriever.add(["a text"], vectors=Hashed().embed_documents(["a text"]))
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(retriever.search("a text"))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert inside.wait(60)
    retriever.close()
    may_go_on.set()
    thread.join()
    assert isinstance(found[0], ResourceClosedError), found


def test_forked_child_does_not_read_what_its_parent_changes() -> None:
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["alpha"], ids=["a"])
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.read(reader, 1)
                retriever.get(["a"])
            except RagDemoError as error:
                os._exit("save them before the fork" not in str(error))
            finally:
                os._exit(2)
        retriever.add(["beta"], ids=["b"])
        os.write(writer, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_user_who_may_not_write_reads_beside_a_writer(kind: Any, tmp_path: Path) -> None:
    """Nor does a save of theirs change anything."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    folder = tmp_path / "i"
    saved(folder, *(f"t{n}" for n in range(61))).close()
    succeed("delete", folder, "t60")  # This makes the folder of words.
    before = {path.name for path in folder.iterdir()}
    assert any(name.startswith("words-") for name in before)
    for each in (*folder.rglob("*"), folder):
        each.chmod(each.stat().st_mode & 0o555)
    for each in (tmp_path, *tmp_path.parents):
        each.chmod(each.stat().st_mode | 0o055)
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            with kind(Hashed()) as retriever:
                assert retriever.load(folder) == 60
                assert len(retriever.search("t5", 9)) == 9
                retriever.save(folder)
        except RagDemoError as error:
            os._exit("cannot be written" not in str(error))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {path.name for path in folder.iterdir()} == before


def test_full_text_is_searched_after_another_process_has_replaced_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"text{n}" for n in range(9000)]
    with PyTorchGPURetriever(Hashed(), device="cpu") as writer:
        writer.add(texts, passages=False)
        writer.save(tmp_path / "i")
        with PyTorchGPURetriever(Hashed(), device="cpu") as reader:
            reader.load(tmp_path / "i")
            writer.add([f"more{n}" for n in range(9000)], passages=False)
            writer.save(tmp_path / "i")
            assert len(list((tmp_path / "i").glob("words-*"))) == 1
            assert [each.text for each in reader.search("text77", mode="bm25")] == ["text77"]
    assert not caplog.records


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
    with PyTorchGPURetriever(Nameless(1), device="cpu") as retriever:
        retriever.add(["a", "bb"])
        retriever.save(tmp_path / "i")
    with PyTorchGPURetriever(Nameless(1), device="cpu") as same:
        assert same.load(tmp_path / "i") == 2
    with PyTorchGPURetriever(Nameless(2), device="cpu") as other:
        with pytest.raises(ModelMismatchError, match="Nameless"):
            other.load(tmp_path / "i")


def test_changes_of_metadata_do_not_take_memory_for_ever(tmp_path: Path) -> None:
    names = [str(n) for n in range(100)]
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(["a text"] * 100, ids=names)
        sizes = []
        for number in range(100):
            retriever.update_metadata(names, [{"n": number}] * 100)
            retriever.save(tmp_path / "i")
            files = (tmp_path / "i").glob("rag-demo-*.sqlite")
            sizes.append(sum(file.stat().st_size for file in files))
        assert max(sizes[50:]) <= max(sizes[:50])
        assert ids(retriever, "a text", where={"n": 99}) <= set(names)
        assert len(retriever.search("a text", 200, where={"n": 99})) == 100


def test_changed_owner_is_damage_that_the_same_source_repairs(
    tiny_model: Path, tmp_path: Path
) -> None:
    source, folder = tmp_path / "s.jsonl", tmp_path / "i"
    write_lines(source, [{"id": n, "text": f"text {n}"} for n in range(20)])
    succeed("index", source, "--out", folder, "--model", tiny_model)
    with contextlib.closing(sqlite3.connect(folder / "rag-demo-1.sqlite")) as database:
        (blob,) = database.execute("SELECT owners FROM pieces").fetchone()
        owners = np.frombuffer(blob, np.int64).copy()
        owners[3] = 1 << 33
        database.execute("UPDATE pieces SET owners = ?", (owners.tobytes(),))
        database.commit()
    assert "damaged" in fail("add", folder, source)
    succeed("index", source, "--out", folder, "--model", tiny_model)
    assert info(folder)["texts"] == 20
    assert "is whole" in succeed("verify", folder)
