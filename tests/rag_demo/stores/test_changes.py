"""A change that is interrupted, fails or is refused is all or nothing."""

import contextlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import FaissRetriever, IndexChangedError, RagDemoError
from tests.support.interrupts import Place, interrupt_everywhere
from tests.support.retriever_kinds import BOTH, OnCpu
from tests.support.small_collections import Hashed, are_nearest, text_of

OLD = {f"d{n}": text_of(n) for n in range(12)}
NEW = {"d3": "golf golf", "new": "echo cache"}
QUERY = "golf echo"

Documents = dict[str, str]


def add(retriever: Any, documents: Documents) -> None:
    texts = list(documents.values())
    retriever.add(texts, [{"n": len(text)} for text in texts], list(documents))


def used(kind: Any) -> Any:
    """Return a retriever that was searched and changed before."""
    retriever = kind(Hashed())
    add(retriever, OLD)
    retriever.search(QUERY, where={"n": {"$gt": 8}})
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


MOST, REST = list(OLD)[:8], dict(list(OLD.items())[8:])
CHANGES: dict[str, tuple[Callable[[Any], object], Documents]] = {
    "replace": (lambda retriever: add(retriever, NEW), OLD | NEW),
    "delete most": (lambda retriever: retriever.delete(MOST), REST),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "at_most"), [(OnCpu, 150), (FaissRetriever, 50)], ids=["torch", "faiss"]
)
@pytest.mark.parametrize("name", CHANGES)
def test_interrupted_change_is_all_or_nothing(kind: Any, name: str, at_most: int) -> None:
    """It finds the old state or the new one; then the change can be done again."""
    (change, after), left_old = CHANGES[name], 0

    def check(place: Place) -> None:
        nonlocal left_old
        with used(kind) as retriever:
            place.run(lambda: change(retriever))
            is_old = is_whole(retriever, OLD)
            assert is_old or is_whole(retriever, after), "neither the old state nor the new one"
            left_old += is_old
            change(retriever)
            assert is_whole(retriever, after)

    interrupt_everywhere(check, package="rag_demo", minimum=at_most // 2, at_most=at_most)
    assert left_old


def test_interrupted_save_can_be_repeated(tmp_path: Path) -> None:
    def check(place: Place) -> None:
        folder = tmp_path / str(place.number)
        with used(OnCpu) as retriever, OnCpu(Hashed()) as reader:
            place.run(lambda: retriever.save(folder))
            add(retriever, NEW)
            retriever.save(folder)
            reader.load(folder)
            assert is_whole(reader, OLD | NEW)

    interrupt_everywhere(check, package="rag_demo.stores", minimum=2, at_most=4)


@pytest.mark.slow
def test_interrupted_load_is_all_or_nothing(tmp_path: Path) -> None:
    """And a later save does not replace what was not loaded."""
    with used(OnCpu) as retriever:
        add(retriever, {"other": "golf"})
        retriever.save(tmp_path / "other")

    def check(place: Place) -> None:
        folder = tmp_path / str(place.number)
        with used(OnCpu) as retriever:
            retriever.save(folder)
            shutil.copytree(tmp_path / "other", folder, dirs_exist_ok=True)
            place.run(lambda: retriever.load(folder))
            is_old = is_whole(retriever, OLD)
            assert is_old or is_whole(retriever, OLD | {"other": "golf"})
            add(retriever, NEW)
            with contextlib.suppress(IndexChangedError):
                retriever.save(folder)
            with used(OnCpu) as reader:
                reader.load(folder)
                assert reader.get(["other"]) != [None], "a lost update"

    interrupt_everywhere(check, package="rag_demo.stores.local", minimum=30, at_most=60)


WRONG: list[tuple[Any, type[Exception], str]] = [
    ((["a", "b"], [{}, None], ["p", "q"]), TypeError, "must be a mapping"),
    ((["a"], [{"x": {1}}], ["p"]), TypeError, "not JSON: set "),
    ((["a"], [{1: 2}], ["p"]), TypeError, "keys must be str"),
    ((["a"], [{"x": float("nan")}], ["p"]), ValueError, "not JSON: .* float"),
    ((["a"], [{"n": [10**4300]}], ["p"]), ValueError, "not JSON: .*digits"),
    ((["a", "b"], None, [1, "1"]), TypeError, r"ids\[0\] must be str"),
    ((["a", "b"], None, "pq"), TypeError, "ids must be a sequence of str, got one str"),
    ((["a", "b"], None, ["x", "x"]), ValueError, "'x' appears twice"),
    ((["a", "b"], [{}], None), ValueError, "2 texts but 1 metadata"),
    ((None,), TypeError, "texts must be a sequence of str, got None"),
    (("text",), TypeError, "texts must be a sequence of str, got one str"),
    ((["a", b"b"], None, ["p", "q"]), TypeError, r"texts\[1\] must be str"),
    ((["a", ""], None, ["p", "d1"]), ValueError, "the vector of text 'd1' is zero"),
    ((["nan"], None, ["d1"]), ValueError, "the vector of text 'd1' is not finite"),
]


class Peculiar(Hashed):
    """Returns zero or infinite vectors for some texts."""

    def embed_documents(self, texts: Any) -> Any:
        strange = {"": 0.0, "nan": np.nan}
        factors = [strange.get(text, 1.0) for text in texts]
        return super().embed_documents(texts) * np.asarray(factors)[:, None]


class Short(Hashed):
    dimension = 5

    def embed_documents(self, texts: Any) -> Any:
        return super().embed_documents(texts)[:, :5]


@BOTH
def test_refused_change_changes_nothing(kind: Any) -> None:
    """An empty retriever accepts any dimension."""
    with used(kind) as retriever:
        retriever.embedding_model = Peculiar()
        for arguments, error, message in WRONG:
            with pytest.raises(error, match=message):
                retriever.add(*arguments)
        with pytest.raises(TypeError, match="must be str"):
            retriever.delete(["d1", 2])
        retriever.embedding_model = Short()
        for call in (retriever.search, lambda text: retriever.add([text], ids=["d1"])):
            with pytest.raises(ValueError, match="5 dimensions, but those of the index 8"):
                call("golf")
        retriever.embedding_model = Hashed()
        assert is_whole(retriever, OLD)
        retriever.embedding_model = Short()
        retriever.delete(list(OLD))
        retriever.add(["a"])
        assert len(retriever.search("a")) == 1


def test_failed_load_changes_nothing(tmp_path: Path) -> None:
    """Of a missing index, and of one that the memory budget cannot hold."""
    with used(OnCpu) as retriever:
        retriever.save(tmp_path / "index")
    with used(partial(OnCpu, memory_budget=100)) as retriever:
        with pytest.raises(ValueError, match="memory_budget must be at least"):
            retriever.load(tmp_path / "index")
        with pytest.raises(RagDemoError):
            retriever.load(tmp_path / "nowhere")
        assert is_whole(retriever, OLD)
