"""Many documents with equal vectors: the first ones by id, whatever else is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rag_demo.search.reference import GivenVectors, check_all, filled, normal
from tests.support.retriever_kinds import OnCpu


@pytest.fixture(params=["float32", "float16"])
def model_and_retriever(request: Any) -> Any:
    vectors = normal(6_000, 12)
    vectors[np.arange(6_000) % 3 == 0] = vectors[7]  # 2,000 are equal,
    vectors[1:200:3] = vectors[8]  # and 67,
    vectors[2:59:3] = vectors[5]  # and 19.
    model = GivenVectors(vectors, np.concatenate([vectors[[7, 8, 5]], normal(9, 12, seed=1)]))
    with OnCpu(model, dtype=request.param) as retriever:
        yield model, retriever


def test_equal_vectors_are_ordered_by_id(model_and_retriever: Any, tmp_path: Path) -> None:
    model, retriever = model_and_retriever
    index = filled(retriever, model)
    for top_k in (1, 10, 2_500):
        check_all(retriever, index, top_k)
        check_all(retriever, index, top_k, where={"even": True})
        check_all(retriever, index, top_k, where={"hundred": 3})
    first = [result.id for result in retriever.search("0", 20, mode="dense")]
    assert retriever.delete(first) == index.delete(first) == 20
    retriever.add(["7", "7"], [{}, {}], ["0 is first", "z"])
    index.add(["7", "7"], [{}, {}], ["0 is first", "z"])
    check_all(retriever, index, 10)
    retriever.save(tmp_path / "index")
    retriever.load(tmp_path / "index")
    check_all(retriever, index, 10)


def test_only_equal_vectors(model_and_retriever: Any) -> None:
    _, retriever = model_and_retriever
    names = [str(number) for number in range(300)]
    retriever.add(["7"] * 300, ids=names)
    for count in (1, 50, 300, 500):
        results = retriever.search("0", count, mode="dense")
        assert [result.id for result in results] == sorted(names)[:count]
        assert len({result.score for result in results}) == 1
