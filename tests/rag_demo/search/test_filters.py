"""Filters by metadata find what docs/rag_demo/retrieval.md says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rag_demo.search.reference import GivenVectors, normal
from tests.support.retriever_kinds import OnCpu

MODEL = GivenVectors(normal(400, 4), np.ones((1, 4)))
REPEATED = 40


def add(retriever: Any, start: int = 0) -> None:
    """Add `SOME` many times."""
    names = [str(number) for number in range(start, start + 5 * REPEATED)]
    retriever.add(names, SOME * REPEATED, names)


SOME = [
    {"lang": "en", "year": 2001, "day": "2020-01-03", "tags": ["a"], "of": {"n": 1}},
    {"lang": "de", "year": 2005.5, "day": "2020-01-02"},
    {"lang": "fr", "year": "2005", "none": None},
    {"year": 2010, "is": True, "big": 2**53 + 1, "of": {"n": True}},
    {},
]
WRITTEN_OUT = [
    ({"lang": {"$ne": "en"}}, [1, 2]),
    ({"lang": {"$in": ["fr", "xx"]}}, [2]),
    ({"lang": {"$nin": ["fr", "xx"]}}, [0, 1]),
    ({"year": {"$gte": 2001, "$lt": 2010}}, [0, 1]),
    ({"year": {"$gt": "2001"}}, [2]),
    ({"year": 2005}, []),
    ({"year": [2001, np.float64(2005.5)]}, [0, 1]),
    ({"day": {"$lte": "2020-01-02"}}, [1]),
    ({"tags": ["a"]}, []),
    ({"of": {"n": 1}}, [0]),
    ({"none": None}, [2]),
    ({"$and": [{"year": {"$gt": 2001}}, {"year": {"$lt": 2010}}]}, [1]),
    ({"$or": [{"lang": "en"}, {"lang": "de"}], "year": {"$gt": 2001}}, [1]),
    ({"$not": {"lang": "en"}}, [1, 2, 3, 4]),
    ({"day": {"$contains": "01-0"}}, [0, 1]),
    ({"is": {"$in": [True, None]}}, [3]),
    ({"is": {"$gt": 0}}, []),
    ({"big": 2**53}, []),
    ({"big": {"$gt": 2**53}}, [3]),
    ({}, [0, 1, 2, 3, 4]),
    (lambda metadata: metadata.get("year") in (2001, 2010) or not metadata, [0, 3, 4]),
]


def test_filters_find_what_the_documentation_says(tmp_path: Path) -> None:
    """Of a saved index too, after more documents came, and after some were deleted."""
    with OnCpu(MODEL) as retriever:
        add(retriever)
        retriever.save(tmp_path / "index")
        retriever.load(tmp_path / "index")
        check(retriever, range(REPEATED))
        add(retriever, 5 * REPEATED)
        retriever.delete([str(number) for number in range(5 * REPEATED)])
        check(retriever, range(REPEATED, 2 * REPEATED))


def check(retriever: Any, repeats: range) -> None:
    for where, wanted in WRITTEN_OUT:
        every = [5 * n + number for n in repeats for number in wanted]
        found = retriever.search("0", 400, where=where, mode="dense")
        assert sorted(int(result.id) for result in found) == every, where
        three = retriever.search("0", 3, where=where)
        assert len(three) == min(3, len(every))
        assert {int(result.id) for result in three} <= set(every)


def test_filters_that_nothing_can_match_are_errors() -> None:
    wrong: list[tuple[Any, type[Exception]]] = [
        ({1: 2}, TypeError),
        (5, TypeError),
        ({"a": {"$near": 2}}, ValueError),
        ({"a": {"$gt": None}}, TypeError),
        ({"a": {"$in": "text"}}, TypeError),
        ({"$or": {"a": 1}}, TypeError),
        ({"$gt": 2}, ValueError),
        ({"a": {"gt": 2}}, ValueError),
        ({"a": np.arange(3)}, TypeError),
    ]
    with OnCpu(MODEL) as retriever:
        add(retriever)
        for where, error in wrong:
            with pytest.raises(error, match="where"):
                retriever.search("0", where=where)
