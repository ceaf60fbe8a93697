"""A closed retriever holds nothing: no vectors, no documents, no words, no files."""

from __future__ import annotations

import dataclasses
import gc
import queue
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import FaissRetriever, PyTorchGPURetriever, Retriever
from torch_utils import release

COUNT = 2000
MOST_BYTES = 20_000  # of an empty retriever, its lock and its fields


class Model:
    """Every text lies somewhere; what it is asked for is its own."""

    name = "m"
    dimension = 16

    def embed_documents(self, texts: Any) -> Any:
        return np.random.default_rng(len(texts)).standard_normal((len(texts), 16))

    def embed_query(self, text: str) -> Any:
        return np.ones(16)


class VectorsOnly(PyTorchGPURetriever):
    """The control: what a subclass gave up when the base class gave up nothing."""

    def _release(self) -> None:
        self._held = dataclasses.replace(self._held, vectors=self._held.vectors.emptied())


class NoOverride(PyTorchGPURetriever):
    """A subclass that does nothing about it."""

    _release = Retriever._release


def fill(retriever: Retriever) -> None:
    texts = [f"document {n} is about the word number{n % 97}" for n in range(COUNT)]
    retriever.add(texts, [{"n": n} for n in range(COUNT)], passages=True)
    retriever.search("number1", mode="hybrid")
    retriever.search_batch(["number1"] * 8, top_k=3)


def reachable_bytes(retriever: Retriever) -> int:
    """Add up what a retriever leads to, but for classes, modules, code, and its model."""
    seen = {id(retriever.embedding_model)}
    pending: list[Any] = list(retriever.__dict__.values())
    total = 0
    while pending:
        found = pending.pop()
        if id(found) in seen or isinstance(found, (type, types.ModuleType, types.FunctionType)):
            continue
        seen.add(id(found))
        total += sys.getsizeof(found) + (found.nbytes if hasattr(found, "nbytes") else 0)
        pending += gc.get_referents(found)
    return total


@pytest.mark.parametrize("kind", [PyTorchGPURetriever, FaissRetriever, NoOverride])
def test_nothing_is_reachable(kind: Any) -> None:
    """What a closed retriever leads to is no more than an empty one is made of."""
    retriever = kind(Model())
    fill(retriever)
    assert reachable_bytes(retriever) > 100 * COUNT
    retriever.close()
    assert reachable_bytes(retriever) < MOST_BYTES
    assert len(retriever) == 0


def test_control_vectors_only() -> None:
    """The count sees documents and words that stay."""
    retriever = VectorsOnly(Model(), device="cpu")
    fill(retriever)
    retriever.close()
    assert reachable_bytes(retriever) > 100 * COUNT


@pytest.mark.parametrize("kind", [PyTorchGPURetriever, FaissRetriever])
def test_everything_goes_at_once(kind: Any) -> None:
    """Without a collection: no cycle keeps documents, words or rows."""
    retriever = kind(Model())
    fill(retriever)
    held = [retriever._held.documents, retriever._held.words, retriever._held.rows]
    references = [weakref.ref(each) for each in held]
    del held
    gc.disable()
    try:
        retriever.close()
        assert [reference() for reference in references] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [PyTorchGPURetriever, FaissRetriever])
def test_files_are_closed(kind: Any, tmp_path: Path) -> None:
    """An opened index is mapped no longer."""
    with kind(Model()) as writer:
        fill(writer)
        writer.save(tmp_path / "index")
    retriever = kind(Model())
    retriever.load(tmp_path / "index")
    retriever.search("number1")
    mapped = weakref.ref(retriever._held.documents._source)
    assert mapped() is not None
    retriever.close()
    assert mapped() is None
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()


def test_no_waiting_thread_is_named_as_a_holder(tmp_path: Path) -> None:
    """What is released is gone, whichever threads of the program wait in code of C."""
    lines: queue.SimpleQueue[None] = queue.SimpleQueue()
    waiting = threading.Thread(target=_get, args=(lines,))
    waiting.start()
    try:
        retriever = PyTorchGPURetriever(Model(), device="cpu")
        fill(retriever)
        retriever.save(tmp_path / "index")
        retriever.load(tmp_path / "index")
        retriever.search_batch(["number1"] * 8, top_k=3)
        assert release(retriever).still_held == ()
    finally:
        lines.put(None)
        waiting.join()


def _get(lines: queue.SimpleQueue[None]) -> None:
    lines.get()


def test_faiss_index_is_emptied_in_place() -> None:
    """A variable that leads to the index keeps no vectors."""
    from torch_utils import ReleasedError

    retriever = FaissRetriever(Model())
    fill(retriever)
    index = retriever._held.vectors.index
    retriever.close()
    with pytest.raises(ReleasedError, match="was released"):
        _ = index.ntotal


@pytest.mark.parametrize("options", [{"dtype": "int3"}, {"memory_budget": 0}])
def test_half_built(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One whose arguments were refused is given up without a word."""
    with pytest.raises(ValueError, match="must be"):
        PyTorchGPURetriever(Model(), **options)
    gc.collect()
    assert caplog.records == []
