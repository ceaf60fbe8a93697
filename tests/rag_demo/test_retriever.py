"""Both retrievers: wrong arguments raise one clear error, and figures are right."""

from pathlib import Path
from typing import Any

import pytest

from rag_demo import EmbeddingModel, PyTorchGPURetriever
from tests.support.programs import assert_clean, run, run_forked
from tests.support.retriever_kinds import BOTH, OnCpu
from tests.support.small_collections import DIMENSION, Hashed

TEXTS = ["cache", "memory", "paris", "tensor", "gradient", "a cache of memory"]


PROGRAM = """
import sys, torch
sys.modules["psycopg"] = None  # It may be missing.
from pathlib import Path
from rag_demo import *
assert Document and "PgVectorRetriever" not in globals()

class Model:
    dimension = 2
    def embed_query(self, text): return [len(text), 1]
    def embed_documents(self, texts): return [self.embed_query(text) for text in texts]

def use(kind):
    with kind(Model()) as retriever:
        retriever.add(["a", "bbb", "cccccccc"])
        assert retriever.search("bbb", top_k=1)[0].text == "bbb"
        retriever.save(folder / kind.__name__)
    left_open = kind(Model())
    assert left_open.load(folder / kind.__name__) == 3
    left_open.add(["d"])
    return left_open

folder = Path(sys.argv[1])
torch.kept = [use(PyTorchGPURetriever), use(FaissRetriever)]
"""


def test_program_with_open_retrievers_exits_cleanly(tmp_path: Path) -> None:
    """With a star import, which needs no driver of a database."""
    assert_clean(run_forked(PROGRAM, str(tmp_path)))


def test_top_k_must_be_positive() -> None:
    with OnCpu(Hashed()) as retriever:
        wrong: Any = (0, 1.5, True, "3")
        for top_k in wrong:
            with pytest.raises(ValueError, match="top_k must be a positive whole number"):
                retriever.search("cache", top_k=top_k)
        retriever.add(["one", "two"])
        model: Any = retriever.embedding_model  # Another thread adds while a query is embedded.
        model.embed_queries = lambda q: retriever.add(["new"]) and model.embed_documents(q)
        assert len(retriever.search("one", top_k=2**70)) == 3


class WrongCount(Hashed):
    def __init__(self, count: int) -> None:
        self.count = count

    def embed_documents(self, texts: Any) -> Any:
        return super().embed_documents(["one", "two", "three"][: self.count])

    embed_queries = embed_documents


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_or_too_many_vectors_are_refused(count: int) -> None:
    with OnCpu(WrongCount(3)) as retriever:
        with pytest.raises(ValueError, match=r"got 3 vectors for 2 texts"):
            retriever.add(["one", "two"])
        retriever.embedding_model = Hashed()
        retriever.add(["one", "two"])
        retriever.embedding_model = WrongCount(count)
        for mode in ("dense", "hybrid"):
            with pytest.raises(ValueError, match=f"{count} vectors for 2 texts|the shape"):
                retriever.search_batch(["one", "two"], mode=mode)


def test_filters_of_extreme_values() -> None:
    with OnCpu(Hashed()) as retriever:
        retriever.add(["a", "b"], [{"n": -(10**400)}, {"n": 70_000}], ["a", "b"])
        assert retriever.count({"n": {"$lt": 0}}) == retriever.count({"n": {"$gt": 0}}) == 1
        more_than_sqlite_takes = list(range(60_000))
        assert retriever.count({"n": {"$nin": more_than_sqlite_takes}}) == 2


@BOTH
def test_stats_report_size_dimension_and_bytes(kind: Any) -> None:
    with kind(Hashed()) as retriever:
        assert (retriever.stats().size, retriever.stats().dimension) == (0, 0)
        retriever.add(TEXTS)
        stats = retriever.stats()
    assert (stats.size, stats.dimension, stats.device) == (6, DIMENSION, "cpu")
    assert (stats.dtype, stats.nbytes) == ("float32", 6 * DIMENSION * 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_copy_of_another_dtype_keeps_the_float32_vectors(dtype: str) -> None:
    nbytes = 128 * DIMENSION * (2 + 4)
    with OnCpu(Hashed(), dtype=dtype) as retriever:
        retriever.add([f"{'abc' * (n + 1)}" for n in range(128)])
        assert retriever.search("abc", 1, mode="dense")[0].score == pytest.approx(1, abs=1e-6)
        assert nbytes <= retriever.stats().nbytes < 1.2 * nbytes


def test_slips_that_would_change_or_answer_the_wrong_thing_are_refused() -> None:
    with OnCpu(Hashed()) as retriever:
        with pytest.raises(TypeError, match="a list with one mapping for each text"):
            retriever.add(["a", "b"], {"x": 1, "y": 2})  # type: ignore[arg-type]
        retriever.add(["a", "b"])
        with pytest.raises(ValueError, match="matches all documents"):
            retriever.delete(where={})
        with pytest.raises(TypeError, match="another mode than 'bm25'"):
            retriever.search(None, mode="bm25", vector=[1.0] * Hashed().dimension)
        assert retriever.delete(where={"$id": {"$exists": True}}) == 2


@pytest.mark.parametrize("model", ["a name", None, EmbeddingModel])
def test_object_that_cannot_embed_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match="is not an embedding model"):
        PyTorchGPURetriever(model)


def test_model_whose_dimension_is_not_that_of_its_vectors_is_refused() -> None:
    class Wrong(Hashed):
        dimension = DIMENSION + 1

    with OnCpu(Wrong()) as retriever:
        with pytest.raises(ValueError, match=f"vectors of {DIMENSION} numbers, but its dimension"):
            retriever.add(["a"])


def test_import_without_the_extra_says_what_to_install() -> None:
    result = run(
        """
        import sys
        sys.modules["numpy"] = None
        from rag_demo import PyTorchGPURetriever
        """
    )
    *_, last = result.stderr.splitlines()
    assert "pip install" in last and "numpy" in last, str(result)
