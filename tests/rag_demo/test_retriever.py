"""Both retrievers: exact answers, one interface, clean exits. Also a program of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from programs import assert_clean, run_forked
from rag_demo import FaissRetriever, PyTorchGPURetriever, Retriever
from torch_utils import ReleasedError, ResourceClosedError

KINDS = (PyTorchGPURetriever, FaissRetriever)


class LetterModel:
    """Counts letters: an embedding model that needs nothing and knows a little."""

    name = "letters"
    dimension = 26

    def embed_query(self, text: str) -> Any:
        return self.embed_documents([text])[0]

    def embed_documents(self, texts: Any) -> Any:
        rows = [[text.lower().count(chr(97 + i)) for i in range(26)] for text in texts]
        return np.asarray(rows, np.float32)


TEXTS = ["cache", "memory", "paris", "tensor", "gradient", "a cache of memory"]


def main() -> None:
    """Index, ask, save, load, close: with every kind, some left open for exit to close."""
    import tempfile

    for kind in KINDS:
        with kind(LetterModel()) as retriever, tempfile.TemporaryDirectory() as folder:
            retriever.add(TEXTS)
            assert retriever.search("caches", top_k=1)[0].text == "cache"
            retriever.save(Path(folder) / "index")
            left_open = kind(LetterModel())
            assert left_open.load(Path(folder) / "index") == len(TEXTS)
            sys.modules[kind.__name__] = left_open  # type: ignore[assignment]


@pytest.mark.slow
def test_as_a_program() -> None:
    """This file, run by itself, leaves with exit code 0 and says nothing on stderr."""
    assert_clean(run_forked(Path(__file__)))


NAIVE = f"""
import sys, torch
sys.path.append({str(Path(__file__).parent)!r})
from rag_demo import PyTorchGPURetriever
from test_retriever import LetterModel

class Naive:
    def __init__(self):
        self.embeddings_tensor = torch.ones(3)
    def __del__(self):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

torch.kept = {{kept}}
"""


def test_naive_destructor_is_caught() -> None:
    """Negative control: kept alive by an attribute of torch, today's practice leaves dirty."""
    result = run_forked(NAIVE.format(kept="Naive()"))
    assert "Exception ignored" in result.stderr
    assert result.returncode == 0  # Which is why the exit code alone proves nothing.
    with pytest.raises(AssertionError):
        assert_clean(result)


def test_retriever_kept_by_torch_is_clean() -> None:
    """The twin of the control: the retriever at the very same place."""
    kept = "PyTorchGPURetriever(LetterModel()); torch.kept.add(['a', 'b'])"
    assert_clean(run_forked(NAIVE.format(kept=kept)))


@pytest.fixture(params=KINDS)
def retriever(request: pytest.FixtureRequest) -> Any:
    with request.param(LetterModel()) as opened:
        yield opened


def test_exact_against_brute_force(retriever: Retriever) -> None:
    """Scores and order are those of a plain float64 computation, single and batched."""
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh"), size=12)) for _ in range(300)]
    retriever.add(texts)
    model = LetterModel()
    vectors = model.embed_documents(texts).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = ["abc", "hhg", "fed"]
    batch = retriever.search_batch(queries, top_k=10)
    for query, results in zip(queries, batch, strict=True):
        question = model.embed_query(query).astype(np.float64)
        scores = vectors @ (question / np.linalg.norm(question))
        assert [r.score for r in results] == pytest.approx(np.sort(scores)[::-1][:10], abs=1e-6)
        assert [r.rank for r in results] == list(range(1, 11))
        assert [r.id for r in results] == [r.id for r in retriever.search(query, top_k=10)]


def test_ties_are_broken_by_id(retriever: Retriever) -> None:
    """Of many equal texts the smallest ids come first, whatever the order of adding."""
    ids = [f"{n:03}" for n in range(200)]
    retriever.add(["same"] * 200, ids=ids[::-1])
    retriever.add(["zzz"], ids=["other"])
    assert [r.id for r in retriever.search("same", top_k=3)] == ids[:3]


def test_filter_is_inside_the_search(retriever: Retriever) -> None:
    """Asking for five gives five when five match, however many others score higher."""
    retriever.add(["cache"] * 50, [{"lang": "en"}] * 50)
    retriever.add(["memory"] * 5, [{"lang": "de", "n": n} for n in range(5)])
    assert len(retriever.search("cache", 5, where={"lang": "de"})) == 5
    assert len(retriever.search("cache", 5, where={"lang": ["de", "fr"], "n": [1, 2]})) == 2
    assert len(retriever.search("cache", 9, where=lambda m: m.get("n", -1) > 2)) == 2
    assert retriever.search("cache", 5, where={"lang": "xx"}) == []


def test_add_replace_delete(retriever: Retriever) -> None:
    """An id that is there is replaced; what is deleted is not found."""
    assert retriever.add(TEXTS, ids=list("abcdef")) == list("abcdef")
    retriever.add(["zebra"], ids=["a"])
    assert len(retriever) == 6
    assert retriever.search("zebra", 1)[0].id == "a"
    assert retriever.delete(["a", "nobody"]) == 1
    assert "a" not in [r.id for r in retriever.search("zebra", 10)]
    assert retriever.delete(list("bcdef")) == 5
    assert len(retriever) == 0
    assert retriever.search("zebra") == []
    assert retriever.add(["again"]) == ["0"]


def test_min_score_and_k_beyond_n(retriever: Retriever) -> None:
    """More than there is gives all there is; a minimum score leaves the rest out."""
    retriever.add(TEXTS)
    results = retriever.search("cache", top_k=100)
    assert len(results) == len(TEXTS)
    assert retriever.search("cache", 100, min_score=0.99)[0].text == "cache"
    assert len(retriever.search("cache", 100, min_score=0.99)) == 1


@pytest.mark.parametrize("top_k", [0, -1, 1.5, True, "3"])
def test_bad_top_k(retriever: Retriever, top_k: Any) -> None:
    """A count that is no positive whole number is refused by name."""
    retriever.add(TEXTS)
    with pytest.raises(ValueError, match="top_k must be a positive whole number"):
        retriever.search("cache", top_k=top_k)


def test_bad_vectors_are_refused(retriever: Retriever) -> None:
    """A vector without a direction is named by its row, and nothing is added."""
    with pytest.raises(ValueError, match="row 1 is zero"):
        retriever.add(["fine", "123"])
    with pytest.raises(ValueError, match="row 0 is not finite"):
        retriever.embedding_model = NanModel()
        retriever.add(["fine"])
    assert len(retriever) == 0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_vectors_of_other_questions_are_refused(retriever: Retriever, count: int) -> None:
    """Too few or too many vectors belong to nobody knows which question, or text."""
    retriever.embedding_model = CountingWrong()
    with pytest.raises(ValueError, match=r"the model made 3 vectors of 2 texts"):
        retriever.add(["one", "two"])
    retriever.embedding_model = LetterModel()
    retriever.add(["one", "two"])
    retriever.embedding_model = CountingWrong(count)
    for mode in ("dense", "hybrid"):
        with pytest.raises(ValueError, match=f"{count} vectors of 2 texts|the shape"):
            retriever.search_batch(["one", "two"], mode=mode)


class CountingWrong(LetterModel):
    def __init__(self, count: int = 3) -> None:
        self.count = count

    def embed_documents(self, texts: Any) -> Any:
        return super().embed_documents(["one", "two", "three"][: self.count])

    embed_queries = embed_documents


class NanModel(LetterModel):
    def embed_documents(self, texts: Any) -> Any:
        return np.full((len(texts), 26), np.nan)


def test_bad_input_is_refused(retriever: Retriever) -> None:
    """Lengths that differ, ids that repeat and a bare string each get a clear error."""
    with pytest.raises(ValueError, match="2 texts but 1 metadata"):
        retriever.add(["a", "b"], metadata=[{}])
    with pytest.raises(ValueError, match="'x' stands twice"):
        retriever.add(["a", "b"], ids=["x", "x"])
    with pytest.raises(TypeError, match="sequence of texts"):
        retriever.add("text")
    with pytest.raises(TypeError, match="use search"):
        retriever.search_batch("text")


@pytest.mark.parametrize("other", KINDS)
def test_index_of_one_opens_in_the_other(
    retriever: Retriever, other: type[Any], tmp_path: Path
) -> None:
    """A saved index gives the same answers, whichever retriever reads it."""
    retriever.add(TEXTS, [{"n": n} for n in range(len(TEXTS))], ids=list("abcdef"))
    retriever.save(tmp_path / "index")
    with other(LetterModel()) as reader:
        reader.add(["gone after loading"])
        assert reader.load(tmp_path / "index") == len(TEXTS)
        ours, theirs = retriever.search("caches", 6), reader.search("caches", 6)
        assert [(r.id, r.text, r.metadata) for r in ours] == [
            (r.id, r.text, r.metadata) for r in theirs
        ]
        assert [r.score for r in ours] == pytest.approx([r.score for r in theirs], abs=1e-6)


def test_use_after_close(retriever: Retriever) -> None:
    """Every operation on a closed retriever raises one clear error."""
    retriever.add(TEXTS)
    assert retriever.close() is True
    assert retriever.close() is False
    for use in (
        lambda: retriever.search("x"),
        lambda: retriever.add(["x"]),
        lambda: retriever.delete(["0"]),
        lambda: retriever.save("nowhere"),
        lambda: retriever.load("nowhere"),
    ):
        with pytest.raises(ResourceClosedError, match="Retriever is closed"):
            use()


def test_close_gives_the_tensor_back() -> None:
    """The tensor is emptied in place, although a variable still names it."""
    retriever = PyTorchGPURetriever(LetterModel())
    retriever.add(TEXTS)
    tensor = retriever.embeddings_tensor
    assert tensor.shape == (len(TEXTS), 26)
    retriever.close()
    assert retriever.embeddings_tensor is None
    assert tensor.numel() == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_storage_types(dtype: str) -> None:
    """Half-width storage finds the same texts."""
    with PyTorchGPURetriever(LetterModel(), dtype=dtype) as retriever:
        retriever.add(TEXTS)
        assert retriever.search("caches", 1)[0].text == "cache"
    with pytest.raises(ValueError, match="dtype must be"):
        PyTorchGPURetriever(LetterModel(), dtype="int3")


def test_released_model_is_named() -> None:
    """Searching with a model that was released raises its error, not garbage."""
    import torch

    from torch_utils import release

    class TorchModel(LetterModel):
        layer = torch.nn.Linear(26, 26)

        def embed_documents(self, texts: Any) -> Any:
            return self.layer(torch.from_numpy(super().embed_documents(texts))).detach().numpy()

    with PyTorchGPURetriever(TorchModel()) as retriever:
        retriever.add(TEXTS)
        release(TorchModel.layer)
        with pytest.raises(ReleasedError, match="Linear was released"):
            retriever.search("cache")


if __name__ == "__main__":
    main()
