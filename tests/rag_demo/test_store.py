"""A saved index that is changed, shared, interrupted or read-only; and a reranker."""

from __future__ import annotations

import gc
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rag_demo import FaissRetriever, Reranker
from rag_demo.errors import ModelError
from tests.support.programs import run_forked
from tests.support.rag_command import info
from tests.support.releasing import gone, weak
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import DIMENSION, Hashed, text_of
from tests.support.tiny_model import write_tiny_reranker
from torch_utils import ResourceClosedError

BOTH = pytest.mark.parametrize("kind", [OnCpu, FaissRetriever], ids=["torch", "faiss"])
MODES = ("dense", "bm25", "hybrid")
QUERY = "golf echo"
TEXTS = [f"{text_of(n)} number{n}" for n in range(100)]
WAIT_S = 60
TRANSFORMERS = pytest.mark.xdist_group("transformers")  # Imported once, by one worker only.


def add(retriever: Any, count: int = len(TEXTS)) -> None:
    names = [str(n) for n in range(count)]
    retriever.add(TEXTS[:count], [{"n": n} for n in range(count)], names)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with OnCpu(Hashed()) as retriever:
        add(retriever)
        retriever.save(tmp_path / "index")
    return tmp_path / "index"


def answers(retriever: Any) -> list[Any]:
    return [retriever.search(QUERY, 10, mode=mode) for mode in MODES]


def answers_of(folder: Path) -> list[Any]:
    with OnCpu(Hashed()) as retriever:
        retriever.load(folder)
        return answers(retriever)


def bytes_of_vectors(folder: Path) -> int:
    (file,) = folder.glob("vectors-*.f32")
    return file.stat().st_size


@BOTH
def test_second_save_writes_only_the_changes(kind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    with kind(Hashed()) as retriever:
        add(retriever)
        retriever.save(folder)
        (file,) = folder.glob("vectors-*.f32")
        before = file.stat()
        retriever.add(["golf golf"], ids=["new"])
        retriever.delete(["3"])
        retriever.save(folder)
        after = file.stat()
        assert after.st_size == before.st_size + 4 * DIMENSION
        assert after.st_ino == before.st_ino
        retriever.save(folder)
        assert bytes_of_vectors(folder) == after.st_size
        expected = answers(retriever)
    with kind(Hashed()) as fresh:
        assert fresh.load(folder) == 100
        assert answers(fresh) == expected
        assert "3" not in {each.id for each in fresh.search(QUERY, 200)}
        assert fresh.search("golf golf", 1)[0].id == "new"


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


def test_results_share_no_metadata() -> None:
    with OnCpu(Hashed()) as retriever:
        retriever.add(["golf"], [{"tags": ["a"]}])
        (first,), (second,) = retriever.search_batch(["golf", "golf"])
        tags: list[str] = first.metadata["tags"]
        tags.append("b")
        assert second.metadata == retriever.search("golf")[0].metadata == {"tags": ["a"]}


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
        expected, where, found = retriever.search(QUERY, 200, mode="dense"), Blocked(), list[Any]()
        thread = threading.Thread(
            target=lambda: found.append(retriever.search(QUERY, 200, where=where, mode="dense"))
        )
        thread.start()
        try:
            assert where.is_inside.wait(WAIT_S)
            retriever.add(["golf golf"], ids=["new"])
            retriever.delete(["1", "2"])
            retriever.save(folder)
            retriever.save(tmp_path / "other")
            assert retriever.search("golf golf", 1)[0].id == "new"
        finally:
            where.may_go_on.set()
            thread.join(WAIT_S)
        assert found == [expected]
        assert answers_of(folder) == answers_of(tmp_path / "other") == answers(retriever)


def in_child(work: Callable[[], object]) -> int:
    """Do something in a forked child, and return its exit status."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@BOTH
def test_forked_child_searches_without_affecting_the_parent(kind: Any, folder: Path) -> None:
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
        retriever.save(folder)
    assert answers_of(folder) == changed != expected


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_reranker(tmp_path_factory.mktemp("cross"), QUERY, TEXTS[:9])


@pytest.fixture
def reranker(cross_encoder: Path) -> Iterator[Reranker]:
    with Reranker(cross_encoder, device="cpu") as reranker:
        yield reranker


@TRANSFORMERS
def test_reranker_orders_results_by_its_scores(reranker: Reranker) -> None:
    with OnCpu(Hashed()) as retriever:
        add(retriever)
        first = retriever.search(QUERY, 25)
        found = retriever.search(QUERY, 5, rerank=reranker)
        scores = dict(zip([each.id for each in first],
                          reranker.score(QUERY, [each.text for each in first]).tolist(),
                          strict=True))  # fmt: skip
        best = sorted(scores, key=lambda name: (-scores[name], name))[:5]
        assert [each.id for each in found] == best != [each.id for each in first[:5]]
        assert [each.rank for each in found] == [1, 2, 3, 4, 5]
        assert [each.score for each in found] == pytest.approx([scores[each.id] for each in found])
        batch = retriever.search_batch([QUERY, "delta"], 5, rerank=reranker)
        assert [each.id for each in batch[0]] == best
        assert retriever.search(QUERY, 5, where={"n": -1}, rerank=reranker) == []


def models_of(kind: type) -> set[Any]:
    return {each for each in gc.get_objects() if type(each) is kind}


@TRANSFORMERS
def test_closed_reranker_is_released_and_raises(cross_encoder: Path) -> None:
    from transformers import BertForSequenceClassification

    before = models_of(BertForSequenceClassification)
    reranker = Reranker(cross_encoder, device="cpu")
    assert len(reranker.score("the", ["cache", "memory"])) == 2
    (model,) = models_of(BertForSequenceClassification) - before
    weights = weak(model)
    del model
    reranker.close()
    assert gone(weights)
    for use in (
        lambda: reranker.score("the", ["cache"]),
        lambda: reranker.rerank("the", []),
    ):
        with pytest.raises(ResourceClosedError):
            use()


@pytest.mark.parametrize("wrong", ["nowhere", "empty"])
@TRANSFORMERS
def test_folder_without_a_cross_encoder_is_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "empty").mkdir()
    with Reranker(tmp_path / wrong, device="cpu") as reranker:
        for _ in range(2):
            with pytest.raises(ModelError, match=wrong) as error:
                reranker.score("the", ["cache"])
            assert "\n" not in str(error.value)
