"""Loading, replacing and closing a retriever."""

import gc
import os
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from rag_demo import FaissRetriever, PyTorchGPURetriever, Retriever
from tests.support.programs import run_forked
from tests.support.waiting import wait_for

KINDS = [PyTorchGPURetriever, pytest.param(FaissRetriever, marks=pytest.mark.slow)]
COUNT = 1500


class Model:
    """Texts lie anywhere."""

    name = "m"
    dimension = 64

    def embed_documents(self, texts: Any) -> Any:
        return np.random.default_rng(len(texts[0])).standard_normal((len(texts), 64))

    def embed_query(self, text: str) -> Any:
        return np.arange(64) + 1.0


class Text(str):
    """A text that can be referred to weakly."""


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
@pytest.mark.parametrize("kind", KINDS)
def test_closed_retriever_holds_nothing(kind: Any) -> None:
    """Neither texts nor derived data, and without a garbage collection."""
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
    assert all(reference() is None for reference in references)
    assert kept_bytes < 100 * COUNT
    assert len(retriever) == 0


def files_open_in(folder: Path) -> set[str]:
    """Return files that this process has open or mapped."""
    mapped = Path("/proc/self/maps").read_text().split()
    names = {*mapped, *map(os.path.realpath, Path("/proc/self/fd").iterdir())}
    return {name for name in names if name.startswith(str(folder))}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("kind", KINDS)
def test_closed_retriever_has_no_files_open(kind: Any, tmp_path: Path) -> None:
    with kind(Model()) as retriever:
        fill(retriever, texts_to_add())
        retriever.save(tmp_path / "index")
        retriever.load(tmp_path / "index")
        retriever.search("number1")
        assert files_open_in(tmp_path)
    wait_for(lambda: not files_open_in(tmp_path))  # A thread of tantivy ends within 0.5 s.


def indexes() -> list[Any]:
    return [each for each in gc.get_objects() if type(each) in (torch.Tensor, faiss.IndexFlatIP)]


@pytest.mark.parametrize("kind", KINDS)
def test_close_empties_the_index_in_place(kind: Any) -> None:
    """As a notebook keeps the frames of an interrupted search, this test keeps the index."""

    def size(index: Any) -> int:
        return int(index.ntotal if kind is FaissRetriever else len(index.untyped_storage()))

    before = set(map(id, indexes()))
    with kind(Model()) as retriever:
        fill(retriever, texts_to_add())
        kept = [each for each in indexes() if id(each) not in before]
        assert sum(map(size, kept)) >= COUNT
    assert sum(map(size, kept)) == 0


BUDGET = """
import sys
import numpy as np
from rag_demo import PyTorchGPURetriever
from torch_utils import measuring

class Model:
    name = "m"
    dimension = 384
    def embed_documents(self, texts):
        return np.random.default_rng(len(texts)).standard_normal((len(texts), 384), np.float32)
    embed_queries = embed_documents
    def embed_query(self, text): return self.embed_queries([text])[0]
folder, count, budget = sys.argv[1], int(sys.argv[2]), eval(sys.argv[3])
with PyTorchGPURetriever(Model(), device="cpu", dtype="bfloat16") as other:
    years = [{"year": 1950 + n % 75} for n in range(count)]
    if budget == 0:
        texts = [f"document {n} about thing{n % 977}" for n in range(count)]
        other.add(texts, years, list(map(str, range(count))))
        other.save(folder)
        sys.exit()
    other.add([str(n) for n in range(100)])  # Brings torch's own code into memory.
    other.search_batch(["x"] * 512, top_k=10)
    other.search("x", mode="bm25")
with PyTorchGPURetriever(Model(), device="cpu", memory_budget=budget) as retriever:
    for work in (
        lambda: retriever.load(folder),
        lambda: retriever.search_batch(["q"] * 512, top_k=10, mode="dense"),
        lambda: retriever.search("q", where={"year": {"$gte": 2000}}),
        lambda: retriever.search_batch(["thing5"] * 20, mode="hybrid"),
        lambda: (retriever.add(["z"], ids=["z"]), retriever.delete(["7"]), retriever.search("q")),
    ):
        with measuring() as taken:
            work()
        print(taken.peak_bytes)
"""


@pytest.mark.slow
def test_memory_budget_limits_every_operation(tmp_path: Path) -> None:
    """Without a budget it is exceeded; opening is cheap."""
    count, budget = 60_000, 32 << 20
    found = {}
    for option in ("0", str(budget), "None"):
        result = run_forked(BUDGET, str(tmp_path / "i"), str(count), option, quick_end=True)
        assert result.returncode == 0, str(result)
        found[option] = list(map(int, result.stdout.split()))
    limited, unlimited = found[str(budget)], found["None"]
    # Beside the budget: the owners of the vectors, what words count, and 5,120 results.
    assert max(limited) < budget + 64 * count
    vectors = 4 * 384 * count
    assert max(unlimited) > vectors
    assert unlimited[0] < vectors / 4, "opening reads the vectors"
