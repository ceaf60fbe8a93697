"""A store that threads, forked children, other users and writers use at the same time."""

import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rag_demo import RagDemoError
from tests.support.programs import run_forked
from tests.support.rag_command import IMPORT_MAIN, info, succeed
from tests.support.retriever_kinds import BOTH, OnCpu
from tests.support.small_collections import Hashed, text_of
from torch_utils import ResourceClosedError

QUERY = "golf echo"
WAIT_S = 60
THREAD = ThreadPoolExecutor(1)
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with OnCpu(Hashed()) as retriever:
        names = [str(n) for n in range(100)]
        texts = [f"{text_of(n)} number{n}" for n in range(100)]
        retriever.add(texts, [{"n": n} for n in range(100)], names)
        retriever.save(tmp_path / "index")
    return tmp_path / "index"


def answers(retriever: Any) -> list[Any]:
    return [retriever.search(QUERY, 10, mode=mode) for mode in ("dense", "bm25", "hybrid")]


def answers_of(folder: Path) -> list[Any]:
    with OnCpu(Hashed()) as retriever:
        retriever.load(folder)
        return answers(retriever)


class Blocked(Hashed):
    """A model, and a filter, that wait until they are told to go on."""

    def __init__(self) -> None:
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, metadata: Any) -> bool:
        self.is_inside.set()
        return self.may_go_on.wait(WAIT_S)

    def embed_query(self, text: str) -> Any:
        assert self(text)
        return super().embed_query(text)


@BOTH
def test_running_search_blocks_no_change_or_save(kind: Any, folder: Path, tmp_path: Path) -> None:
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
    model = Blocked()
    retriever = OnCpu(model)
    retriever.add(["a text"])
    running = THREAD.submit(retriever.search, "a text")
    assert model.is_inside.wait(WAIT_S)
    retriever.close()
    model.may_go_on.set()
    with pytest.raises(ResourceClosedError):
        running.result(WAIT_S)


def test_results_share_no_metadata() -> None:
    with OnCpu(Hashed()) as retriever:
        retriever.add(["golf"], [{"tags": ["a"]}])
        (first,), (second,) = retriever.search_batch(["golf", "golf"])
        first.metadata["tags"].append("b")
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


@pytest.mark.slow
def test_reader_is_not_disturbed_by_another_process(tmp_path: Path, caplog: Any) -> None:
    """A second reader drops no lock of the first; closing a file drops all of its process."""
    folder = tmp_path / "index"
    with OnCpu(Hashed()) as retriever:
        texts = [f"{number} {'golf ' * 250}" for number in range(5000)]
        retriever.add(texts, [{"n": n} for n in range(5000)], passages=False)
        retriever.save(folder)
        retriever.load(folder)
        assert info(folder)["texts"] == 5000
        command = ("delete", str(folder), "--where", "n<4900")
        run_forked(f"{IMPORT_MAIN}; main()", *command, quick_end=True)
        for mode in ("dense", "bm25"):
            found = retriever.search("golf", 5000, mode=mode)
            assert sorted(each.text for each in found) == sorted(texts), mode
        assert info(folder)["texts"] == 100
        assert len(list(folder.glob("words-*"))) == 1
    assert not caplog.records


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
@forks
@BOTH
def test_forked_child_does_not_affect_its_parent(kind: Any, folder: Path) -> None:
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
        assert in_child(retriever.close) == 0
        retriever.add(["golf golf"], ids=["new"])
        changed = answers(retriever)
        assert in_child(retriever.close) == 0
        retriever.add(["golf echo"], ids=["another"])
        assert {each.id for each in retriever.search("golf", 200, mode="bm25")} >= {"new"}
        retriever.delete(["another"])
        retriever.save(folder)
    assert answers_of(folder) == changed != expected


@forks
def test_forked_child_refuses_what_its_parent_has_not_saved() -> None:
    def child() -> None:
        with pytest.raises(RagDemoError, match="save them before the fork"):
            retriever.get(["a"])

    with OnCpu(Hashed()) as retriever:
        retriever.add(["alpha"], ids=["a"])
        assert in_child(child) == 0


@forks
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_user_who_may_not_write_reads_beside_a_writer(folder: Path) -> None:
    """Nor does a save of theirs change anything."""

    def child() -> None:
        os.setuid(65534)
        with OnCpu(Hashed()) as retriever:
            assert retriever.load(folder) == 99
            assert len(retriever.search("golf", 9, mode="bm25")) == 9
            retriever.add(["more"])
            with pytest.raises(RagDemoError, match="cannot be written"):
                retriever.save(folder)

    succeed("delete", folder, "60")  # This makes the folder of words.
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert any("words-" in str(path) for path in before)
    for each in (*before, folder):
        each.chmod(each.stat().st_mode & 0o555)
    for each in folder.parents:
        each.chmod(each.stat().st_mode | 0o055)
    assert in_child(child) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
