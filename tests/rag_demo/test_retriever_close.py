"""A closed retriever holds nothing: no vectors, no documents, no words, no files."""

from __future__ import annotations

import gc
import os
import queue
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import FaissRetriever, PyTorchGPURetriever, Retriever
from torch_utils import ReleasedError, release

KINDS = [PyTorchGPURetriever, FaissRetriever]
COUNT = 2000
MOST_BYTES = 100 * COUNT


class Model:
    """Every text lies somewhere; what it is asked for is its own."""

    name = "m"
    dimension = 16

    def embed_documents(self, texts: Any) -> Any:
        return np.random.default_rng(len(texts)).standard_normal((len(texts), 16))

    def embed_query(self, text: str) -> Any:
        return np.ones(16)


class Text(str):
    """A text that can be referred to weakly."""


class Keeps(PyTorchGPURetriever):
    """The control: a retriever that does not give up all that it holds."""

    def add(self, texts: Any, *arguments: Any, **options: Any) -> Any:
        self.kept = [(text, text.split()) for text in texts]
        return super().add(texts, *arguments, **options)


def texts_to_add() -> list[Text]:
    return [Text(f"document {n} is about the word number{n % 97}") for n in range(COUNT)]


def fill(retriever: Retriever, texts: list[Text]) -> None:
    """Add documents, and search them in all ways."""
    retriever.add(texts, [{"n": n} for n in range(COUNT)], passages=True)
    retriever.search("number1", mode="hybrid", where={"n": {"$gt": 3}})
    retriever.search_batch(["number1"] * 8, top_k=3)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("kind", "is_empty"), [*((kind, True) for kind in KINDS), (Keeps, False)])
def test_closed_retriever_holds_nothing(kind: Any, is_empty: bool) -> None:
    """Neither texts nor what was made of them, and no cycle has to be collected first."""
    with kind(Model()) as first:  # Imports what is needed, and fills the caches of libraries.
        fill(first, texts_to_add())
    retriever, texts = kind(Model()), texts_to_add()
    references = list(map(weakref.ref, texts))
    tracemalloc.start()
    try:
        fill(retriever, texts)
        del texts
        retriever.close()
        kept_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(references) == COUNT
    assert all(reference() is None for reference in references) is is_empty
    assert (kept_bytes < MOST_BYTES) is is_empty, kept_bytes
    assert len(retriever) == 0


def files_open_in(folder: Path) -> set[str]:
    """Return files that this process has open or mapped."""
    maps = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    links = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            links.add(os.readlink(descriptor))
        except FileNotFoundError:  # The descriptor that lists the folder.
            continue
    return {name for name in maps | links if name.startswith(str(folder))}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("kind", KINDS)
def test_closed_retriever_has_no_files_open(kind: Any, tmp_path: Path) -> None:
    with kind(Model()) as writer:
        fill(writer, texts_to_add())
        writer.save(tmp_path / "index")
    assert not files_open_in(tmp_path)
    retriever = kind(Model())
    retriever.load(tmp_path / "index")
    retriever.search("number1")
    assert files_open_in(tmp_path)
    retriever.close()
    assert not files_open_in(tmp_path)


def test_no_waiting_thread_is_reported_as_a_holder(tmp_path: Path) -> None:
    """What is released is gone, whichever threads of the program wait in code of C."""
    lines: queue.SimpleQueue[None] = queue.SimpleQueue()
    waiting = threading.Thread(target=lines.get)
    waiting.start()
    try:
        retriever = PyTorchGPURetriever(Model(), device="cpu")
        fill(retriever, texts_to_add())
        retriever.save(tmp_path / "index")
        retriever.load(tmp_path / "index")
        retriever.search_batch(["number1"] * 8, top_k=3)
        assert release(retriever).still_held == ()
    finally:
        lines.put(None)
        waiting.join()


def test_close_empties_the_tensor_in_place() -> None:
    """A variable that names the tensor keeps no memory."""
    retriever = PyTorchGPURetriever(Model())
    fill(retriever, texts_to_add())
    tensor = retriever.embeddings_tensor
    assert tensor.shape == (COUNT, 16)
    retriever.close()
    assert retriever.embeddings_tensor is None
    assert tensor.numel() == 0


def test_close_empties_the_faiss_index_in_place() -> None:
    import faiss

    def indexes() -> list[Any]:
        return [each for each in gc.get_objects() if type(each) is faiss.IndexFlatIP]

    before = set(map(id, indexes()))
    retriever = FaissRetriever(Model())
    fill(retriever, texts_to_add())
    (index,) = (each for each in indexes() if id(each) not in before)
    assert index.ntotal == COUNT
    retriever.close()
    with pytest.raises(ReleasedError, match="was released"):
        _ = index.ntotal


@pytest.mark.parametrize("options", [{"dtype": "int3"}, {"memory_budget": 0}])
def test_half_built_retriever_is_silent(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="must be"):
        PyTorchGPURetriever(Model(), **options)
    gc.collect()
    assert caplog.records == []
