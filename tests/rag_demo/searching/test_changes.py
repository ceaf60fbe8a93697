"""Documents that come, go and are replaced: answers are those of an index made anew."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collections_of import Hashed, nearest, text_of

from rag_demo import FaissRetriever, PyTorchGPURetriever
from rag_demo.documents.document import Document
from rag_demo.documents.growing import Growing
from rag_demo.index import write_index
from rag_demo.ingest import ingest
from rag_demo.searching.postings import Postings

KINDS: list[Any] = [
    pytest.param(FaissRetriever, {}, id="faiss"),
    pytest.param(PyTorchGPURetriever, {"device": "cpu"}, id="float32"),
    *(
        pytest.param(PyTorchGPURetriever, {"device": "cpu", "dtype": dtype}, id=dtype)
        for dtype in ("bfloat16", "int8")
    ),
    pytest.param(PyTorchGPURetriever, {"device": "cpu", "memory_budget": 8400}, id="streamed"),
]


def check(retriever: Any, documents: dict[str, str], kind: Any, options: Any) -> None:
    """All modes and a filter, against brute force and a retriever that is new."""
    assert len(retriever) == len(documents)
    queries = ["alpha cache", "golf"]
    for query, results in zip(queries, retriever.search_batch(queries, top_k=7), strict=True):
        found = [(result.id, result.score) for result in results]
        assert found == nearest(documents, query, 7)
        assert all(documents[result.id] == result.text for result in results)
    one = {name: text for name, text in documents.items() if len(text) % 2}
    odd = retriever.search("echo", 4, where={"odd": 1})
    assert [(result.id, result.score) for result in odd] == nearest(one, "echo", 4)
    with kind(Hashed(), **options) as fresh:
        names = list(documents)[::-1]
        texts = [documents[name] for name in names]
        fresh.add(texts, [{"odd": len(text) % 2} for text in texts], names)
        for mode in ("bm25", "hybrid"):
            for where in (None, {"odd": 0}):
                assert retriever.search("delta bravo", 6, where=where, mode=mode) == fresh.search(
                    "delta bravo", 6, where=where, mode=mode
                )


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_any_changes(
    kind: Any, options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adding, replacing, deleting, saving and loading, in any order; small limits are passed."""
    monkeypatch.setattr("rag_demo.searching.tensor_vectors._MOST_TAIL", 16)
    monkeypatch.setattr("rag_demo.searching.tensor_vectors._ROUNDED_AT_ONCE", 32)
    monkeypatch.setattr("rag_demo.searching.tensor_vectors._FEW_ALLOWED", 8)
    monkeypatch.setattr("rag_demo.searching.columns._ENOUGH", 10)
    chance = random.Random(1)
    documents: dict[str, str] = {}
    with kind(Hashed(), **options) as retriever:
        for step in range(60):
            what = chance.random()
            if what < 0.45 or not documents:
                count = chance.choice([1, 1, 2, 40])
                names = [str(chance.randrange(300)) for _ in range(count)]
                new = {name: text_of(chance.randrange(500)) for name in names}
                metadata = [{"odd": len(text) % 2} for text in new.values()]
                retriever.add(list(new.values()), metadata, list(new))
                documents |= new
            elif what < 0.85:
                gone = chance.sample(sorted(documents), min(len(documents), chance.choice([1, 9])))
                assert retriever.delete([*gone, "nobody"]) == len(gone)
                documents = {name: documents[name] for name in documents.keys() - set(gone)}
            elif what < 0.95:
                retriever.save(tmp_path / f"{step}")
                assert retriever.load(tmp_path / f"{step}") == len(documents)
            if step % 4 == 0:
                check(retriever, documents, kind, options)
        retriever.delete(list(documents))
        check(retriever, {}, kind, options)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_an_answer_is_a_copy(kind: Any, options: Any) -> None:
    """What a program does to an answer, or to what it has given, is not done to the store."""
    given = {"tags": ["a"], "of": {"n": 1}}
    with kind(Hashed(), **options) as retriever:
        retriever.add(["alpha"], [given], ["x"])
        given["tags"].append("b")  # type: ignore[attr-defined]
        first = retriever.search("alpha")[0]
        assert first.metadata == {"tags": ["a"], "of": {"n": 1}}
        first.metadata["tags"].append("c")
        first.metadata["of"]["n"] = 2
        first.metadata["new"] = True  # type: ignore[index]
        assert retriever.search("alpha")[0].metadata == {"tags": ["a"], "of": {"n": 1}}


def test_default_ids_go_on(tmp_path: Path) -> None:
    """Names that were given by default are not given again, after a load either."""
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        assert retriever.add(["a", "b"]) == ["0", "1"]
        retriever.add(["x"], ids=["2"])
        assert retriever.add(["c", "d"]) == ["3", "4"]
        retriever.save(tmp_path / "i")
        retriever.delete(["4"])
        assert retriever.add(["e"]) == ["5"]
        retriever.load(tmp_path / "i")
        assert retriever.add(["f"]) == ["5"]


def test_the_tensor_is_whole() -> None:
    """Asking for it puts together what was added and deleted since."""
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add([text_of(n) for n in range(50)])
        retriever.add(["echo"])
        retriever.delete(["3"])
        assert retriever.embeddings_tensor.shape == (50, 8)
        tensor = retriever.embeddings_tensor
        assert tensor is retriever.embeddings_tensor
        assert len(retriever.search("echo", top_k=100)) == 50


def test_growing() -> None:
    """A snapshot is what it was; one that was dropped leaves nothing behind."""
    first = Growing(np.arange(3))
    second = first.append([3, 4])
    dropped = second.append([9] * 100)
    third = second.append([5])
    assert [len(each) for each in (first, second, third, dropped)] == [3, 5, 6, 105]
    assert first.rows.tolist() == [0, 1, 2]
    assert second.rows.tolist() == [0, 1, 2, 3, 4]
    assert third.rows.tolist() == [0, 1, 2, 3, 4, 5]


def test_postings() -> None:
    """Joined, thinned out and counted beyond what fits beside a document's number."""
    one = Postings.of([np.asarray([4, 1]), np.asarray([1])], [np.asarray([2, 70]), [5]], [72, 5])
    two = Postings.of([np.asarray([1, 9])], [np.asarray([1000, 63])], [1063]).moved(2)
    both = Postings.join([one, two])
    assert [each.tolist() for each in both.find(1, None)] == [
        [0, 1, 2],
        [70, 5, 1000],
        [72, 5, 1063],
    ]
    assert [each.tolist() for each in both.find(9, None)] == [[2], [63], [1063]]
    assert both.find(2, None)[0].tolist() == []
    assert both.find(1, np.asarray([False, True, True]))[0].tolist() == [1, 2]
    kept = both.kept(np.asarray([0, 2]))
    assert [each.tolist() for each in kept.find(1, None)] == [[0, 1], [70, 1000], [72, 1063]]
    assert Postings.join([]).find(1, None)[0].tolist() == []


def test_a_large_index_is_checked_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept copy answers until all vectors are checked; answers are exact at each moment."""
    monkeypatch.setattr("rag_demo.searching.vector_store._FEW_BYTES", 0)
    documents = {f"{n:03}": text_of(n) for n in range(300)}
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add(list(documents.values()), ids=list(documents))
        held = retriever._held
        vectors, kept = held.vectors.vectors(), held.vectors.derived()
        write_index(tmp_path / "i", "hashed", vectors, held.documents, derived=kept)
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.load(tmp_path / "i")
        saved = retriever._held.vectors._base.saved  # type: ignore[attr-defined]
        checked = []
        for number in range(20):
            query = text_of(number)
            found = [(r.id, r.score) for r in retriever.search(query, 7)]
            assert found == nearest(documents, query, 7)
            checked.append(saved._is_checked)
            if number == 3:
                retriever.add(["echo echo"], ids=["new"])
                documents["new"] = "echo echo"
        assert not checked[5]
        assert checked[-1]


@pytest.mark.parametrize("which", ["scan.vectors", "scan.scales", "scan.errors"])
def test_kept_copies_of_other_vectors(which: str, tmp_path: Path) -> None:
    """A copy of another shape is not used."""
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.add([text_of(n) for n in range(64)])
        kept = retriever._held.vectors.derived()
        before = retriever.search_batch(["echo"] * 2)
        kept[which] = kept[which][:-1]
        held = retriever._held
        write_index(tmp_path / "j", "hashed", held.vectors.vectors(), held.documents, derived=kept)
        retriever.load(tmp_path / "j")
        assert retriever.search_batch(["echo"] * 2) == before


def test_an_ingested_index_has_it_all(tmp_path: Path) -> None:
    """Words, columns and copies are there when it is opened; a search makes none of them."""
    documents = [
        Document(f"{n:03}", text_of(n) + " of many others" * 20, {"n": n, "even": n % 2 == 0})
        for n in range(200)
    ]
    ingest(documents, Hashed(), tmp_path / "i")
    with PyTorchGPURetriever(Hashed(), device="cpu") as retriever:
        retriever.load(tmp_path / "i")
        held = retriever._held
        kept = held.vectors._base.saved.derived  # type: ignore[attr-defined]
        assert {"ids.order", "words1.packed", "columns1.keys"} <= set(kept)
        table = held.documents
        table._source = OnlyLength(len(table))  # type: ignore[assignment]
        assert held.columns.matching({"n": {"$lt": 9}, "even": True}, table).sum() == 5
        assert len(held.words.search("golf", table, None)[0]) > 5


class OnlyLength:
    """A source that nobody may read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, number: int) -> Document:
        raise AssertionError(f"document {number} is read")
