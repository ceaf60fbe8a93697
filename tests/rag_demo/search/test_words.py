"""Search by words, and by words and vectors: what docs/retrieval.md promises, not exact scores."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import FaissRetriever, PyTorchGPURetriever
from tests.rag_demo.search.reference import GivenVectors

KINDS = [PyTorchGPURetriever, FaissRetriever]
RARE = ["gradient", "parks", "tensor", "cuda", "heap"]
COUNT = 1_200


class Vectors(GivenVectors):
    """Texts and queries begin with the number of their vector."""

    def __init__(self) -> None:
        chance = np.random.default_rng(4)
        super().__init__(chance.standard_normal((COUNT, 8)), chance.standard_normal((4, 8)))


def texts() -> list[str]:
    chance = random.Random(6)
    words = [*RARE, *["memory", "cache"] * 8]
    return [f"{n} {' '.join(chance.choices(words, k=chance.randrange(9)))}" for n in range(COUNT)]


def filled(kind: Any) -> Any:
    retriever = kind(Vectors())
    names = [f"d{number:04}" for number in range(COUNT)]
    retriever.add(texts(), [{"even": n % 2 == 0} for n in range(COUNT)], names)
    return retriever


def ids(results: Any) -> list[str]:
    return [result.id for result in results]


@pytest.mark.parametrize("kind", KINDS)
def test_words_find_the_documents_that_have_them(kind: Any, tmp_path: Path) -> None:
    """All of these and no others, the best first, ties by id; after changes and saving too."""
    with filled(kind) as retriever:
        now = dict(zip((f"d{number:04}" for number in range(COUNT)), texts(), strict=True))
        for change in ("none", "delete", "replace", "save"):
            if change == "delete":
                gone = sorted(now)[::3]
                retriever.delete(gone)
                now = {name: text for name, text in now.items() if name not in gone}
            elif change == "replace":
                retriever.add(["7 a gradient"], [{"even": True}], ["d0001"])
                now["d0001"] = "7 a gradient"
            elif change == "save":
                retriever.save(tmp_path / "index")
                retriever.load(tmp_path / "index")
            for query in ("gradients", "tensor heap", "nobody"):
                wanted = {"gradients": {"gradient"}, "tensor heap": {"tensor", "heap"}}
                expected = {
                    name
                    for name, text in now.items()
                    if wanted.get(query, {query}) & set(text.split())
                }
                results = retriever.search(query, COUNT, mode="bm25")
                assert set(ids(results)) == expected
                assert len(results) == len(expected)
                assert all(now[result.id] == result.text for result in results)
                order = [(-result.score, result.id) for result in results]
                assert order == sorted(order)
                assert all(result.score > 0 for result in results)


@pytest.mark.parametrize("mode", ["bm25", "hybrid"])
def test_options_are_those_of_dense_search(mode: str) -> None:
    with filled(PyTorchGPURetriever) as retriever:
        query = "1 gradient heap"
        everything = retriever.search(query, 100, mode=mode)
        assert [result.rank for result in everything] == list(range(1, len(everything) + 1))
        assert ids(retriever.search(query, 7, mode=mode)) == ids(everything[:7])
        bar = everything[20].score
        above = retriever.search(query, 100, min_score=bar, mode=mode)
        assert above == [result for result in everything if result.score >= bar]
        batch = retriever.search_batch([query, "2 memory", "3 of"], 5, mode=mode)
        assert batch == [
            retriever.search(each, 5, mode=mode) for each in (query, "2 memory", "3 of")
        ]
        even = retriever.search(query, 30, where={"even": True}, mode=mode)
        assert len(even) == 30
        assert all(result.metadata["even"] for result in even)


def test_the_end_of_a_long_text_is_found() -> None:
    with PyTorchGPURetriever(OneVector(), device="cpu") as retriever:
        retriever.add(["word " * 500_000 + "needle", "a needle in the hay"])
        assert {result.id for result in retriever.search("needle", mode="bm25")} == {"0", "1"}


class OneVector(GivenVectors):
    """All texts have one vector."""

    def __init__(self) -> None:
        super().__init__(np.ones((1, 2)), np.ones((1, 2)))

    def embed_documents(self, texts: Any) -> Any:
        return self.documents[[0] * len(texts)]

    embed_queries = embed_documents
