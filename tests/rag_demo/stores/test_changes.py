"""A change that is interrupted, fails or is refused is all or nothing."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import FaissRetriever, IndexChangedError, PyTorchGPURetriever, RagDemoError
from rag_demo.stores.index_folder import IndexWriter
from tests.support.interrupts import Place, interrupt_everywhere
from tests.support.retriever_kinds import OnCpu
from tests.support.small_collections import Hashed, are_nearest, text_of

KINDS: list[Any] = [
    pytest.param(FaissRetriever, {}, id="faiss"),
    pytest.param(PyTorchGPURetriever, {"device": "cpu"}, id="torch"),
]
OLD = {f"d{n}": text_of(n) for n in range(12)}
NEW = {"d3": "golf golf", "new": "echo cache"}
QUERY = "golf echo"

Documents = dict[str, str]


def add(retriever: Any, documents: Documents) -> None:
    texts = list(documents.values())
    retriever.add(texts, [{"n": len(text)} for text in texts], list(documents))


def search(retriever: Any) -> None:
    retriever.search(QUERY, mode="hybrid", where={"n": {"$gt": 8}})


def used(kind: Any, options: Any) -> Any:
    """A retriever that was searched and changed before."""
    retriever = kind(Hashed(), **options)
    add(retriever, OLD)
    search(retriever)
    retriever.delete(["d11"])
    add(retriever, {"d11": OLD["d11"]})
    return retriever


def is_whole(retriever: Any, documents: Documents) -> bool:
    """Whether all that can be asked is answered as it should be."""
    dense = retriever.search(QUERY, 20, mode="dense")
    words = retriever.search("golf", 20, mode="bm25")
    long = retriever.search(QUERY, 20, where={"n": {"$gte": 11}}, mode="dense")
    return (
        len(retriever) == len(documents)
        and are_nearest(dense, documents, QUERY, 20)
        and {r.id for r in words} == {n for n, text in documents.items() if "golf" in text.split()}
        and {r.id for r in long} == {n for n, text in documents.items() if len(text) >= 11}
        and all(documents[r.id] == r.text for r in (*words, *long))
    )


def without(*names: str) -> Documents:
    return {name: text for name, text in OLD.items() if name not in names}


FEW = list(OLD)[:8]
CHANGES: dict[str, tuple[Callable[[Any], object], Documents]] = {
    "replace": (lambda retriever: add(retriever, NEW), OLD | NEW),
    "delete": (lambda retriever: retriever.delete(["d2", "d3"]), without("d2", "d3")),
    "delete most": (lambda retriever: retriever.delete(FEW), without(*FEW)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "at_most"),
    [(*KINDS[1].values, 150), (*KINDS[0].values, 50)],
    ids=["torch", "faiss"],
)
@pytest.mark.parametrize("name", CHANGES)
def test_interrupted_change_is_all_or_nothing(
    kind: Any, options: Any, name: str, at_most: int
) -> None:
    """It finds the old state or the new one; then the change can be done again."""
    (change, after), left_old = CHANGES[name], 0

    def check(place: Place) -> None:
        nonlocal left_old
        with used(kind, options) as retriever:
            place.run(lambda: change(retriever))
            is_old = is_whole(retriever, OLD)
            assert is_old or is_whole(retriever, after), "neither the old state nor the new one"
            left_old += is_old
            change(retriever)
            assert is_whole(retriever, after)

    interrupt_everywhere(check, package="rag_demo", minimum=at_most // 2, at_most=at_most)
    assert left_old


def test_interrupted_save_can_be_repeated(tmp_path: Path, monkeypatch: Any) -> None:
    """Wherever the interrupt was: here, just before and just after the index is written."""
    folder, commit = tmp_path / "index", IndexWriter.commit

    def interrupted(writer: Any, *arguments: Any, **options: Any) -> None:
        if is_late:
            commit(writer, *arguments, **options)
        raise KeyboardInterrupt

    with OnCpu(Hashed()) as retriever:
        for number, is_late in enumerate((True, False, True)):
            add(retriever, {f"d{number}": text_of(number)})
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(IndexWriter, "commit", interrupted)
                retriever.save(folder)
            retriever.save(folder)
        with OnCpu(Hashed()) as other:
            assert other.load(folder) == 3


@pytest.mark.slow
def test_interrupted_load_is_all_or_nothing(tmp_path: Path) -> None:
    """And a later save does not replace what was not loaded."""
    with used(*KINDS[1].values) as retriever:
        add(retriever, {"other": "golf"})
        retriever.save(tmp_path / "other")

    def check(place: Place) -> None:
        folder = tmp_path / str(place.number)
        with used(*KINDS[1].values) as retriever:
            retriever.save(folder)
            shutil.copytree(tmp_path / "other", folder, dirs_exist_ok=True)
            place.run(lambda: retriever.load(folder))
            is_old = is_whole(retriever, OLD)
            assert is_old or is_whole(retriever, OLD | {"other": "golf"})
            add(retriever, NEW)
            with contextlib.suppress(IndexChangedError):
                retriever.save(folder)
            with used(*KINDS[1].values) as reader:
                reader.load(folder)
                assert reader.get(["other"]) != [None], "a lost update"

    interrupt_everywhere(check, package="rag_demo.stores.local", minimum=30, at_most=60)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "metadata of None": ((["a", "b"], [{}, None], ["p", "q"]), TypeError, "must be a mapping"),
    "a set": ((["a"], [{"x": {1}}], ["p"]), TypeError, "not JSON: set "),
    "a key": ((["a"], [{1: 2}], ["p"]), TypeError, "keys must be str"),
    "not a number": ((["a"], [{"x": float("nan")}], ["p"]), ValueError, "not JSON: .* float"),
    "too many digits": ((["a"], [{"n": [10**4300]}], ["p"]), ValueError, "not JSON: .*digits"),
    "ids": ((["a", "b"], None, [1, "1"]), TypeError, r"ids\[0\] must be str"),
    "one id": ((["a", "b"], None, "pq"), TypeError, "ids must be a sequence of str, got one str"),
    "one id twice": ((["a", "b"], None, ["x", "x"]), ValueError, "'x' appears twice"),
    "too few metadata": ((["a", "b"], [{}], None), ValueError, "2 texts but 1 metadata"),
    "no texts": ((None,), TypeError, "texts must be a sequence of str, got None"),
    "one text": (("text",), TypeError, "texts must be a sequence of str, got one str"),
    "bytes": ((["a", b"b"], None, ["p", "q"]), TypeError, r"texts\[1\] must be str"),
    "no vector": ((["a", ""], None, ["p", "d1"]), ValueError, "the vector of text 'd1' is zero"),
    "not finite": ((["nan"], None, ["d1"]), ValueError, "the vector of text 'd1' is not finite"),
}


class Peculiar(Hashed):
    """Returns zero or infinite vectors for some texts."""

    def embed_documents(self, texts: Any) -> Any:
        strange = {"": 0.0, "nan": np.nan}
        factors = [strange.get(text, 1.0) for text in texts]
        return super().embed_documents(texts) * np.asarray(factors)[:, None]


@pytest.mark.parametrize("name", WRONG)
def test_refused_change_changes_nothing(name: str) -> None:
    arguments, error, message = WRONG[name]
    with used(*KINDS[1].values) as retriever:
        retriever.embedding_model = Peculiar()
        with pytest.raises(error, match=message):
            retriever.add(*arguments)
        with pytest.raises(TypeError, match="must be str"):
            retriever.delete(["d1", 2])
        retriever.embedding_model = Hashed()
        assert is_whole(retriever, OLD)


class Short(Hashed):
    dimension = 5

    def embed_documents(self, texts: Any) -> Any:
        return super().embed_documents(texts)[:, :5]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_vectors_of_another_dimension_are_refused(kind: Any, options: Any) -> None:
    """An empty retriever accepts any dimension."""
    with used(kind, options) as retriever:
        retriever.embedding_model = Short()
        for mode in ("dense", "hybrid"):
            with pytest.raises(ValueError, match="5 dimensions, but those of the index 8"):
                retriever.search("golf", mode=mode)
        with pytest.raises(ValueError, match="5 dimensions, but those of the index 8"):
            retriever.add(["a"], ids=["d1"])
        retriever.embedding_model = Hashed()
        assert is_whole(retriever, OLD)
        retriever.embedding_model = Short()
        retriever.delete(list(OLD))
        retriever.add(["a"])
        assert len(retriever.search("a")) == 1


def test_failed_load_changes_nothing(tmp_path: Path) -> None:
    """Of a missing index, and of one that the memory budget cannot hold."""
    with used(*KINDS[1].values) as retriever:
        retriever.save(tmp_path / "index")
    with used(PyTorchGPURetriever, {"device": "cpu", "memory_budget": 100}) as retriever:
        with pytest.raises(ValueError, match="memory_budget must be at least"):
            retriever.load(tmp_path / "index")
        with pytest.raises(RagDemoError):
            retriever.load(tmp_path / "nowhere")
        assert is_whole(retriever, OLD)
