"""Both retrievers: wrong arguments raise one clear error, figures are right, batches are whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rag_demo import EmbeddingModel, PyTorchGPURetriever
from tests.support.programs import assert_clean, run, run_forked
from tests.support.retriever_kinds import BOTH, KINDS, OnCpu
from tests.support.small_collections import DIMENSION, Hashed, text_of
from torch_utils import ResourceClosedError

PROGRAM = """
import sys, torch
sys.modules["psycopg"] = None  # It may be missing.
from pathlib import Path
from rag_demo import *
from tests.support.small_collections import Hashed
assert Document and "PgVectorRetriever" not in globals()

def use(kind):
    with kind(Hashed()) as retriever:
        retriever.add(["a", "bbb", "cccccccc"])
        assert retriever.search("bbb", top_k=1)[0].text == "bbb"
        retriever.save(folder / kind.__name__)
    left_open = kind(Hashed())
    assert left_open.load(folder / kind.__name__) == 3
    left_open.add(["d"])
    return left_open

folder = Path(sys.argv[1])
torch.kept = [use(PyTorchGPURetriever), use(FaissRetriever)]
"""


def test_program_with_open_retrievers_exits_cleanly(tmp_path: Path) -> None:
    """With a star import, which needs no driver of a database."""
    assert_clean(run_forked(PROGRAM, str(tmp_path)))


WRONG_CALLS: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    *(
        (
            lambda retriever, top_k=top_k: retriever.search("a", top_k),
            ValueError,
            "top_k must be a p",
        )
        for top_k in (0, 1.5, True, "3")
    ),
    *(
        (lambda retriever, n=n: retriever.search("a", neighbors=n), ValueError, "neighbors must be")
        for n in (-1, 1.5, True)
    ),
    (
        lambda retriever: retriever.add(["a", "b"], {"x": 1, "y": 2}),
        TypeError,
        "a list with one mapping for each text",
    ),
    (lambda retriever: retriever.delete(where={}), ValueError, "matches all documents"),
    (
        lambda retriever: retriever.search(None, mode="bm25", vector=[1.0] * DIMENSION),
        TypeError,
        "another mode than 'bm25'",
    ),
    *(
        (
            lambda retriever, model=model: PyTorchGPURetriever(model),
            TypeError,
            "is not an embedding",
        )
        for model in ("a name", None, EmbeddingModel)
    ),
]


def test_wrong_calls_are_refused() -> None:
    """What is extreme is not wrong."""
    with OnCpu(Hashed()) as retriever:
        retriever.add(["a", "b"], [{"n": -(10**400)}, {"n": 70_000}])
        for call, error, message in WRONG_CALLS:
            with pytest.raises(error, match=message):
                call(retriever)
        assert len(retriever.search("one", top_k=2**70)) == 2
        assert retriever.count({"n": {"$lt": 0}}) == retriever.count({"n": {"$gt": 0}}) == 1
        more_than_sqlite_takes = list(range(60_000))
        assert retriever.count({"n": {"$nin": more_than_sqlite_takes}}) == 2


class Wrong(Hashed):
    """Returns a fixed number of vectors."""

    def __init__(self, count: int) -> None:
        self.count = count

    def embed_documents(self, texts: Any) -> Any:
        return super().embed_documents(["one", "two", "three"][: self.count])

    embed_queries = embed_documents


@pytest.mark.parametrize("count", [0, 1, 3])
def test_model_whose_vectors_are_wrong_is_refused(count: int) -> None:
    """Too few, too many, or of another dimension than the model says."""
    model = Wrong(count)
    with OnCpu(model) as retriever:
        retriever.add(["one", "two"], vectors=Hashed().embed_documents(["one", "two"]))
        with pytest.raises(ValueError, match=f"{count} vectors for 2 texts|the shape"):
            retriever.add(["one", "two"])
        for mode in ("dense", "hybrid"):
            with pytest.raises(ValueError, match=f"{count} vectors for 2 texts|the shape"):
                retriever.search_batch(["one", "two"], mode=mode)
    model.count, model.dimension = 1, DIMENSION + 1
    with OnCpu(model) as retriever:
        with pytest.raises(ValueError, match=f"vectors of {DIMENSION} numbers, but its dimension"):
            retriever.add(["one"])


@pytest.mark.parametrize("kind", ["default", "faiss", "float16", "bfloat16"])
def test_stats_report_size_dimension_and_bytes(kind: str) -> None:
    """A copy of another dtype keeps the float32 vectors."""
    with KINDS[kind](Hashed()) as retriever:
        assert (retriever.stats().size, retriever.stats().dimension) == (0, 0)
        retriever.add([f"{'abc' * (n + 1)}" for n in range(128)])
        assert retriever.search("abc", 1, mode="dense")[0].score == pytest.approx(1, abs=1e-6)
        stats = retriever.stats()
    assert (stats.size, stats.dimension, stats.device) == (128, DIMENSION, "cpu")
    nbytes = 128 * DIMENSION * (6 if "float16" in kind else 4)
    assert nbytes <= stats.nbytes < 1.2 * nbytes


@BOTH
def test_batches_of_a_store_make_the_same_index(kind: Any) -> None:
    """They embed nothing; a close does not wait for their end."""
    long = "\n\n".join(f"Paragraph {n} is about {text_of(n)}. " * 8 for n in range(30))
    with kind(Hashed()) as retriever, kind(Hashed()) as other:
        assert list(retriever.store.batches()) == []
        texts = [f"{text_of(n)} number{n}" for n in range(1100)]
        retriever.add(texts, [{"n": n} for n in range(1100)], passages=False)
        retriever.add([long], ids=["long"])
        retriever.update_metadata(["7"], [{"n": -7}])
        retriever.delete(["8"])
        for batch in retriever.store.batches():
            other.store.upsert(batch)
        query = "Paragraph 17 golf echo"
        expected = retriever.search(query, 50, mode="dense")
        assert other.search(query, 50, mode="dense") == expected
        assert other.search("number1021", mode="bm25")[0].id == "1021"
        assert other.get(["7", "8"]) == retriever.get(["7", "8"])
        assert len(other) == 1100
        unfinished = retriever.store.batches()
        next(unfinished)
        retriever.close()
        with pytest.raises(ResourceClosedError):
            next(unfinished)


def test_import_without_the_extra_says_what_to_install() -> None:
    result = run("""
        import sys
        sys.modules["numpy"] = None
        from rag_demo import PyTorchGPURetriever
    """)
    *_, last = result.stderr.splitlines()
    assert "pip install" in last and "numpy" in last, str(result)
