"""A store that threads, forked children and other writers use at the same time."""

import os
import shutil
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rag_demo import IndexChangedError, RagDemoError
from tests.support.programs import run_forked
from tests.support.rag_command import info
from tests.support.retriever_kinds import BOTH, OnCpu
from tests.support.small_collections import Hashed, text_of
from torch_utils import ResourceClosedError

MODES = ("dense", "bm25", "hybrid")
QUERY = "golf echo"
WAIT_S = 60
THREAD = ThreadPoolExecutor(1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with OnCpu(Hashed()) as retriever:
        names = [str(n) for n in range(100)]
        texts = [f"{text_of(n)} number{n}" for n in range(100)]
        retriever.add(texts, [{"n": n} for n in range(100)], names)
        retriever.save(tmp_path / "index")
    return tmp_path / "index"


def answers(retriever: Any) -> list[Any]:
    return [retriever.search(QUERY, 10, mode=mode) for mode in MODES]


def answers_of(folder: Path) -> list[Any]:
    with OnCpu(Hashed()) as retriever:
        retriever.load(folder)
        return answers(retriever)


class Blocked:
    """A filter that waits in the middle of a search, until it is told to go on."""

    def __init__(self) -> None:
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, metadata: Any) -> bool:
        self.is_inside.set()
        assert self.may_go_on.wait(WAIT_S)
        return True


@BOTH
def test_running_search_does_not_block_changes_and_saves(
    kind: Any, folder: Path, tmp_path: Path
) -> None:
    """It returns the state of its beginning."""
    with kind(Hashed()) as retriever:
        retriever.load(folder)
        expected, where = retriever.search(QUERY, 200, mode="dense"), Blocked()
        running = THREAD.submit(retriever.search, QUERY, 200, where=where, mode="dense")
        try:
            assert where.is_inside.wait(WAIT_S)
            retriever.add(["golf golf"], ids=["new"])
            retriever.delete(["1", "2"])
            retriever.save(folder)
            retriever.save(tmp_path / "other")
            assert retriever.search("golf golf", 1)[0].id == "new"
        finally:
            where.may_go_on.set()
        assert running.result(WAIT_S) == expected
        assert answers_of(folder) == answers_of(tmp_path / "other") == answers(retriever)


def test_search_that_waits_for_its_model_sees_the_close() -> None:
    """It gets an error, and never reads what was closed."""
    inside, may_go_on = threading.Event(), threading.Event()

    class Slow(Hashed):
        def embed_query(self, text: str) -> Any:
            inside.set()
            assert may_go_on.wait(WAIT_S)
            return super().embed_query(text)

    retriever = OnCpu(Slow())
    retriever.add(["a text"], vectors=Hashed().embed_documents(["a text"]))
    running = THREAD.submit(retriever.search, "a text")
    assert inside.wait(WAIT_S)
    retriever.close()
    may_go_on.set()
    with pytest.raises(ResourceClosedError):
        running.result(WAIT_S)


def test_close_does_not_wait_for_an_export_that_has_stopped() -> None:
    retriever = OnCpu(Hashed())
    retriever.add([str(n) for n in range(2_100)])
    batches = retriever.store.batches()
    next(batches)
    retriever.close()
    with pytest.raises(ResourceClosedError):
        next(batches)


def test_results_share_no_metadata() -> None:
    with OnCpu(Hashed()) as retriever:
        retriever.add(["golf"], [{"tags": ["a"]}])
        (first,), (second,) = retriever.search_batch(["golf", "golf"])
        tags: list[str] = first.metadata["tags"]
        tags.append("b")
        assert second.metadata == retriever.search("golf")[0].metadata == {"tags": ["a"]}


def test_filters_find_nothing_that_others_saved_after_the_load(folder: Path) -> None:
    """Both new documents have the same number."""
    with OnCpu(Hashed()) as first, OnCpu(Hashed()) as second:
        first.load(folder)
        second.load(folder)
        second.add(["golf"], [{"n": 1000}], ["by the second"])
        second.save(folder)
        first.add(["echo"], [{"n": 2000}], ["by the first"])
        assert first.count({"n": 1000}) == first.count({"$id": "by the second"}) == 0
        assert [each.id for each in first.documents({"n": {"$gte": 99}})] == ["99", "by the first"]


@BOTH
def test_index_made_again_under_a_retriever_is_not_mixed_into_it(kind: Any, tmp_path: Path) -> None:
    def save(folder: Path, *names: str) -> None:
        with OnCpu(Hashed()) as retriever:
            retriever.add(names, ids=names)
            retriever.save(folder)

    save(tmp_path / "a", "a1", "a2")
    with kind(Hashed()) as retriever, kind(Hashed()) as loaded:
        retriever.load(tmp_path / "a")
        shutil.rmtree(tmp_path / "a")
        save(tmp_path / "a", "b1", "b2")
        retriever.add(["a3"], ids=["a3"])
        with pytest.raises(IndexChangedError):
            retriever.save(tmp_path / "a")
        retriever.save(tmp_path / "b")
        loaded.load(tmp_path / "b")
        for each in (retriever, loaded):
            for mode in ("dense", "bm25"):
                found = [r for name in ("a1", "a2", "a3") for r in each.search(name, 5, mode=mode)]
                assert all(result.id == result.text for result in found), mode
                assert {result.id for result in found} == {"a1", "a2", "a3"}, mode


@pytest.mark.slow
def test_full_text_is_searched_after_another_writer_has_replaced_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [f"text{n}" for n in range(9000)]
    with OnCpu(Hashed()) as writer, OnCpu(Hashed()) as reader:
        writer.add(texts, passages=False)
        writer.save(tmp_path / "i")
        reader.load(tmp_path / "i")
        writer.add([f"more{n}" for n in range(9000)], passages=False)
        writer.save(tmp_path / "i")
        assert len(list((tmp_path / "i").glob("words-*"))) == 1
        assert [each.text for each in reader.search("text77", mode="bm25")] == ["text77"]
    assert not caplog.records


@pytest.mark.slow
def test_second_reader_does_not_drop_the_locks_of_the_first(tmp_path: Path) -> None:
    """Closing a file drops all POSIX locks of the process on it."""
    folder = tmp_path / "index"
    with OnCpu(Hashed()) as retriever:
        texts = [f"{number} {'golf ' * 250}" for number in range(5000)]
        retriever.add(texts, [{"n": n} for n in range(5000)], passages=False)
        retriever.save(folder)
        retriever.load(folder)
        assert info(folder)["texts"] == 5000
        command = "from rag_demo.cli import main; main()"
        run_forked(command, "delete", str(folder), "--where", "n<4900", quick_end=True)
        found = retriever.search("golf", 5000, mode="dense")
        assert sorted(each.text for each in found) == sorted(texts)
        assert info(folder)["texts"] == 100


def in_child(work: Callable[[], object]) -> int:
    """Do something in a forked child, and return its exit status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        work()
    except BaseException:  # The child must not go on with the tests.
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@BOTH
def test_forked_child_searches_and_changes_without_affecting_the_parent(
    kind: Any, folder: Path
) -> None:
    with kind(Hashed()) as retriever:
        retriever.load(folder)
        expected = answers(retriever)

        def child() -> None:
            assert answers(retriever) == expected
            retriever.add(["golf golf"], ids=["new"])
            assert answers(retriever) != expected
            retriever.delete(["new"])
            assert retriever.search(QUERY, 10, mode="dense") == expected[0]

        assert in_child(child) == 0
        assert answers(retriever) == expected
        assert in_child(lambda: retriever.close()) == 0
        retriever.add(["golf golf"], ids=["new"])
        changed = answers(retriever)
        assert in_child(lambda: retriever.close()) == 0
        retriever.add(["golf echo"], ids=["another"])
        assert {each.id for each in retriever.search("golf", 200, mode="bm25")} >= {"new"}
        retriever.delete(["another"])
        retriever.save(folder)
    assert answers_of(folder) == changed != expected


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_forked_child_refuses_what_its_parent_has_not_saved() -> None:
    def child() -> None:
        with pytest.raises(RagDemoError, match="save them before the fork"):
            retriever.get(["a"])

    with OnCpu(Hashed()) as retriever:
        retriever.add(["alpha"], ids=["a"])
        assert in_child(child) == 0
