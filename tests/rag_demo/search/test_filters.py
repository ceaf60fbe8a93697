"""Filters by metadata find what docs/rag_demo/retrieval.md says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import FaissRetriever, PyTorchGPURetriever
from tests.rag_demo.search.reference import GivenVectors

KINDS = [PyTorchGPURetriever, pytest.param(FaissRetriever, marks=pytest.mark.slow)]
MODEL = GivenVectors(np.random.default_rng(0).standard_normal((1200, 4)), np.ones((1, 4)))


def add(retriever: Any, metadata: list[Any], start: int = 0) -> None:
    names = [str(number) for number in range(start, start + len(metadata))]
    retriever.add(names, metadata, names)


def found(retriever: Any, where: Any) -> list[int]:
    return sorted(int(result.id) for result in retriever.search("0", 1_200, where=where))


SOME = [
    {"lang": "en", "year": 2001, "day": "2020-01-03", "tags": ["a"], "of": {"n": 1}},
    {"lang": "de", "year": 2005.5, "day": "2020-01-02"},
    {"lang": "fr", "year": "2005", "none": None},
    {"year": 2010, "is": True, "big": 2**53 + 1, "of": {"n": True}},
    {},
]
WRITTEN_OUT = [
    ({"lang": "en"}, [0]),
    ({"lang": ["en", "de"]}, [0, 1]),
    ({"lang": {"$ne": "en"}}, [1, 2]),
    ({"lang": {"$in": ["fr", "xx"]}}, [2]),
    ({"lang": {"$nin": ["fr", "xx"]}}, [0, 1]),
    ({"year": {"$gte": 2001, "$lt": 2010}}, [0, 1]),
    ({"year": {"$gt": 2001}}, [1, 3]),
    ({"year": {"$gt": "2001"}}, [2]),
    ({"year": 2005}, []),
    ({"year": np.int64(2010)}, [3]),
    ({"year": [2001, np.float64(2005.5)]}, [0, 1]),
    ({"year": float("nan")}, []),
    ({"day": {"$lte": "2020-01-02"}}, [1]),
    ({"lang": "en", "year": 2010}, []),
    ({"tags": ["a"]}, []),
    ({"tags": {"$eq": ["a"]}}, [0]),
    ({"of": {"n": 1}}, [0]),
    ({"none": None}, [2]),
    ({"nobody": {"$ne": 1}}, []),
    ({"$or": [{"lang": "en"}, {"year": 2010}]}, [0, 3]),
    ({"$and": [{"year": {"$gt": 2001}}, {"year": {"$lt": 2010}}]}, [1]),
    ({"$or": [{"lang": "en"}, {"lang": "de"}], "year": {"$gt": 2001}}, [1]),
    ({"$not": {"lang": "en"}}, [1, 2, 3, 4]),
    ({"$not": {"$or": [{"lang": "en"}, {"year": 2010}]}}, [1, 2, 4]),
    ({"tags": {"$contains": "a"}}, [0]),
    ({"day": {"$contains": "01-0"}}, [0, 1]),
    ({"of": {"$contains": "n"}}, []),
    ({"of": {"n": True}}, [3]),
    ({"is": 1}, []),
    ({"is": {"$in": [True, None]}}, [3]),
    ({"is": {"$gt": 0}}, []),
    ({"big": 2**53}, []),
    ({"big": {"$gt": 2**53}}, [3]),
    ({}, [0, 1, 2, 3, 4]),
    (lambda metadata: metadata.get("year") in (2001, 2010) or not metadata, [0, 3, 4]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("repeated", [1, 120])
def test_filters_find_what_the_documentation_says(kind: Any, repeated: int, tmp_path: Path) -> None:
    """Of a saved index too, after more documents came, and after some were deleted."""
    with kind(MODEL) as retriever:
        add(retriever, SOME * repeated)
        check(retriever, range(repeated))
        retriever.save(tmp_path / "index")
        retriever.load(tmp_path / "index")
        add(retriever, SOME * repeated, 5 * repeated)
        check(retriever, range(2 * repeated))
        retriever.delete([str(number) for number in range(5 * repeated)])
        check(retriever, range(repeated, 2 * repeated))


def check(retriever: Any, repeats: range) -> None:
    for where, wanted in WRITTEN_OUT:
        every = [5 * n + number for n in repeats for number in wanted]
        assert found(retriever, where) == every, where
        for mode in ("dense", "hybrid"):
            results = retriever.search("0", 3, where=where, mode=mode)
            assert len(results) == min(3, len(every))
            assert {int(result.id) for result in results} <= set(every)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ({1: 2}, TypeError),
        (5, TypeError),
        ({"a": {"$near": 2}}, ValueError),
        ({"a": {"$gt": None}}, TypeError),
        ({"a": {"$in": "text"}}, TypeError),
        ({"$or": {"a": 1}}, TypeError),
        ({"$gt": 2}, ValueError),
        ({"a": {"gt": 2}}, ValueError),
        ({"a": b"text"}, TypeError),
        ({"a": range(3)}, TypeError),
        ({"a": np.arange(3)}, TypeError),
    ],
)
def test_filters_that_nothing_can_match_are_errors(where: Any, error: type[Exception]) -> None:
    with PyTorchGPURetriever(MODEL, device="cpu") as retriever:
        add(retriever, SOME)
        with pytest.raises(error, match="where"):
            retriever.search("0", where=where)
