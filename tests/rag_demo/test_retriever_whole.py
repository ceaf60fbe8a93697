"""A change that fails, or is interrupted at whichever moment, has happened or has not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collections_of import Hashed, nearest, text_of
from interrupting import TESTS, chosen, interrupted, moments

from rag_demo import FaissRetriever, PyTorchGPURetriever
from rag_demo.errors import IndexFileError

KINDS: list[Any] = [
    pytest.param(FaissRetriever, {}, id="faiss"),
    pytest.param(PyTorchGPURetriever, {"device": "cpu"}, id="torch"),
]
# How many moments are tried; each instruction of a change is one in a slow test of its own.
FEW_KINDS: list[Any] = [
    pytest.param(FaissRetriever, {}, id="faiss", marks=pytest.mark.slow),
    KINDS[1],
]
MOST = pytest.mark.parametrize("most", [10, pytest.param(60, marks=pytest.mark.slow)])
OLD = {f"d{n}": text_of(n) for n in range(12)}
NEW = {"d3": "golf golf", "new": "echo cache"}
QUERY = "golf echo"

Documents = dict[str, str]


def filled(kind: Any, options: Any) -> Any:
    retriever = kind(Hashed(), **options)
    retriever.add(list(OLD.values()), [{"n": len(text)} for text in OLD.values()], list(OLD))
    return retriever


def used(kind: Any, options: Any) -> Any:
    """One whose words, columns and copies are there already, with a tail and a gap."""
    retriever = filled(kind, options)
    retriever.search(QUERY, mode="hybrid", where={"n": {"$gt": 0}})
    retriever.delete(["d11"])
    retriever.add([OLD["d11"]], [{"n": len(OLD["d11"])}], ["d11"])
    return retriever


def replace_some(retriever: Any) -> None:
    texts = list(NEW.values())
    retriever.add(texts, [{"n": len(text)} for text in texts], list(NEW))


def is_whole(retriever: Any, documents: Documents) -> bool:
    """Whether all that can be asked is answered as it should be."""
    dense = [(r.id, r.score) for r in retriever.search(QUERY, 20)]
    words = retriever.search("golf", 20, mode="bm25")
    long = retriever.search(QUERY, 20, where={"n": {"$gte": 11}})
    expected = {name for name, text in documents.items() if "golf" in text.split()}
    return (
        len(retriever) == len(documents)
        and dense == nearest(documents, QUERY, 20)
        and {r.id for r in words} == expected
        and {r.id for r in long} == {n for n, text in documents.items() if len(text) >= 11}
        and all(documents[r.id] == r.text for r in (*words, *long))
    )


def check_every_moment(
    make: Callable[[], Any],
    change: Callable[[Any], object],
    after: Documents,
    *,
    opcodes: bool,
    most: int,
    **files: str,
) -> set[str]:
    """Interrupt a change at its moments; return which states were found afterwards."""
    with make() as one:
        count = moments(lambda: change(one), opcodes=opcodes, **files)
        assert is_whole(one, after)
    states = set()
    for moment in chosen(count, most):
        with make() as retriever:
            interrupted(lambda: change(retriever), moment, opcodes=opcodes, **files)
            if is_whole(retriever, OLD):
                states.add("old")
            elif is_whole(retriever, after):
                states.add("new")
            else:
                states.add(f"neither, at {moment} of {count}")
            change(retriever)  # And it is done when it is asked for again.
            assert is_whole(retriever, after)
    return states


CHANGES: dict[str, tuple[Callable[[Any], object], Documents]] = {
    "replace": (replace_some, OLD | NEW),
    "delete": (
        lambda retriever: retriever.delete(["d2", "d3"]),
        {name: text for name, text in OLD.items() if name not in ("d2", "d3")},
    ),
    "compact": (
        lambda retriever: retriever.delete(list(OLD)[:8]),
        dict(list(OLD.items())[8:]),
    ),
}


@MOST
@pytest.mark.parametrize(("kind", "options"), FEW_KINDS)
@pytest.mark.parametrize("name", CHANGES)
def test_interrupted_at_a_line(kind: Any, options: Any, name: str, most: int) -> None:
    """The old state or the new one, and in it every answer is right."""
    change, after = CHANGES[name]
    states = check_every_moment(
        lambda: used(kind, options), change, after, opcodes=False, most=most
    )
    assert states <= {"old", "new"}
    assert "old" in states


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("make", [filled, used])
def test_interrupted_at_an_instruction(kind: Any, options: Any, name: str, make: Any) -> None:
    """At every single one."""
    change, after = CHANGES[name]
    states = check_every_moment(
        lambda: make(kind, options), change, after, opcodes=True, most=1_000_000
    )
    assert states == {"old", "new"}


@MOST
@pytest.mark.parametrize(("kind", "options"), FEW_KINDS)
def test_interrupted_load(kind: Any, options: Any, most: int, tmp_path: Path) -> None:
    """What was here, or what is in the folder; of loading and of the first answers."""
    with filled(kind, options) as other:
        replace_some(other)
        other.save(tmp_path / "i")
    states = check_every_moment(
        lambda: used(kind, options),
        lambda retriever: retriever.load(tmp_path / "i"),
        OLD | NEW,
        opcodes=False,
        most=most,
    )
    assert states <= {"old", "new"}


@MOST
@pytest.mark.parametrize(("kind", "options"), FEW_KINDS)
def test_interrupted_search(kind: Any, options: Any, most: int, tmp_path: Path) -> None:
    """A search makes words and columns on its way; the next one finds them right."""
    with filled(kind, options) as other:
        other.save(tmp_path / "i")

    def make() -> Any:
        retriever = kind(Hashed(), **options)
        retriever.load(tmp_path / "i")
        retriever.delete(["d5"])
        retriever.add([OLD["d5"]], [{"n": len(OLD["d5"])}], ["d5"])
        return retriever

    states = check_every_moment(
        make,
        lambda retriever: retriever.search(QUERY, mode="hybrid", where={"n": {"$gt": 8}}),
        OLD,
        opcodes=False,
        most=most,
    )
    assert states == {"old"}


class Naive(PyTorchGPURetriever):
    """The control: the same steps, each done where it stands, as it was before."""

    def add(self, texts: Any, metadata: Any = None, ids: Any = None, **others: Any) -> Any:
        from dataclasses import replace

        from rag_demo.documents.document import Document
        from rag_demo.documents.rows import DocumentRows
        from rag_demo.vectors import normalized

        vectors = normalized(self.embedding_model.embed_documents(texts))
        self.delete(ids)
        held = self._held
        self._held = replace(held, vectors=held.vectors.appended(vectors))
        rows = held.rows.extended(DocumentRows(len(texts)))
        self._held = replace(self._held, rows=rows)
        new = [Document(*each) for each in zip(ids, texts, metadata, strict=True)]
        alive = None if held.alive is None else np.append(held.alive, np.ones(len(new), bool))
        self._held = replace(
            self._held, documents=held.documents.extended(new), alive=alive, alive_rows=alive
        )


def test_control_steps_in_place() -> None:
    """The same test finds what the naive order of steps leaves behind."""

    def is_either(retriever: Any) -> bool:
        try:
            return is_whole(retriever, OLD) or is_whole(retriever, OLD | NEW)
        except (IndexError, ValueError, AssertionError):
            return False

    with filled(Naive, {"device": "cpu"}) as retriever:
        count = moments(lambda: replace_some(retriever), opcodes=False, files=TESTS)
    broken = 0
    for moment in chosen(count, 60):
        with filled(Naive, {"device": "cpu"}) as retriever:
            interrupted(
                lambda: replace_some(retriever),
                moment,
                opcodes=False,
                files=TESTS,
            )
            broken += not is_either(retriever)
    assert broken > 2


def failing_store(retriever: Any, error: type[BaseException]) -> None:
    """Make the last step before the change fail."""
    import dataclasses

    class Failing(type(retriever._held.vectors)):  # type: ignore[misc]
        def appended(self, vectors: Any) -> Any:
            super().appended(vectors)
            raise error

        def kept(self, rows: Any) -> Any:
            raise error

    store = retriever._held.vectors
    fields = {f.name: getattr(store, f.name) for f in dataclasses.fields(store)}
    retriever._held = dataclasses.replace(retriever._held, vectors=Failing(**fields))


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_memory_error_changes_nothing(kind: Any, options: Any) -> None:
    """While replacing, and while what is left is put together."""
    with used(kind, options) as retriever:
        failing_store(retriever, MemoryError)
        with pytest.raises(MemoryError):
            replace_some(retriever)
        with pytest.raises(MemoryError):
            retriever.delete(list(OLD)[:8])
        assert is_whole(retriever, OLD)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "metadata of None": ((["a", "b"], [{}, None], ["p", "q"]), TypeError, "must be a mapping"),
    "a set": ((["a"], [{"x": {1}}], ["p"]), TypeError, "JSON has"),
    "a key": ((["a"], [{1: 2}], ["p"]), TypeError, "keys are text"),
    "not a number": ((["a"], [{"x": float("nan")}], ["p"]), ValueError, "JSON has not"),
    "ids": ((["a", "b"], None, [1, "1"]), TypeError, "must be a str, not 1"),
    "one id": ((["a", "b"], None, "pq"), TypeError, "not one id"),
    "a text": ((["a", b"b"], None, ["p", "q"]), TypeError, "text 1 must be a str"),
    "no vector": ((["a", ""], None, ["p", "d1"]), ValueError, "row 1 is zero"),
}


class SomeZero(Hashed):
    """Has no vector for an empty text."""

    def embed_documents(self, texts: Any) -> Any:
        return np.stack([super(SomeZero, self).embed_documents([t])[0] * bool(t) for t in texts])


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_changes_nothing(kind: Any, options: Any, name: str) -> None:
    """One error that says what is wrong, before anything is changed, and a save is as before."""
    arguments, error, message = WRONG[name]
    with used(kind, options) as retriever:
        retriever.embedding_model = SomeZero()
        with pytest.raises(error, match=message):
            retriever.add(*arguments)
        with pytest.raises(TypeError, match="an id must be a str"):
            retriever.delete(["d1", 2])
        assert is_whole(retriever, OLD)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_another_dimension(kind: Any, options: Any) -> None:
    """Of documents and of questions; an empty retriever takes any."""

    class Short(Hashed):
        dimension = 5

        def embed_documents(self, texts: Any) -> Any:
            return super().embed_documents(texts)[:, :5]

    with used(kind, options) as retriever:
        retriever.embedding_model = Short()
        for mode in ("dense", "hybrid"):
            with pytest.raises(ValueError, match="5 dimensions, those that are searched 8"):
                retriever.search("golf", mode=mode)
        with pytest.raises(ValueError, match="5 dimensions, those already here 8"):
            retriever.add(["a"], ids=["d1"])
        retriever.embedding_model = Hashed()
        assert is_whole(retriever, OLD)
        retriever.embedding_model = Short()
        retriever.delete(list(OLD))
        retriever.add(["a"])
        assert len(retriever.search("a")) == 1


def test_too_small_a_budget_changes_nothing(tmp_path: Path) -> None:
    """A load that there is no room for leaves what was here."""
    with filled(PyTorchGPURetriever, {"device": "cpu"}) as retriever:
        retriever.save(tmp_path / "i")
    with used(PyTorchGPURetriever, {"device": "cpu", "memory_budget": 100}) as retriever:
        with pytest.raises(ValueError, match="memory_budget must be at least"):
            retriever.load(tmp_path / "i")
        assert is_whole(retriever, OLD)
        with pytest.raises(IndexFileError):
            retriever.load(tmp_path / "nowhere")
        assert is_whole(retriever, OLD)
