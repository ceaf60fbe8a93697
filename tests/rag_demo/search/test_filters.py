"""Filters by metadata against a plain Python reference of the language in docs/retrieval.md.

Numbers are whole numbers of at most 64 bits and floats. A filter is asked of few documents and of
many, before and after saving, because a retriever may look metadata up in different ways.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_demo import FaissRetriever, PyTorchGPURetriever
from tests.rag_demo.search.reference import GivenVectors, matches

KINDS = [PyTorchGPURetriever, pytest.param(FaissRetriever, marks=pytest.mark.slow)]
MODEL = GivenVectors(np.random.default_rng(0).standard_normal((600, 4)), np.ones((1, 4)))

VALUES = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**53, 2**53 + 1, 2**63 - 1, -(2**63), 1.0, 0.5, -2.5, 1e300]),
    st.sampled_from([True, False, None]),
    st.sampled_from(["", "a", "b", "ab", "é", "漢", "10", "9"]),
    st.lists(st.integers(0, 1), max_size=2),
    st.dictionaries(st.sampled_from("xy"), st.integers(0, 1), max_size=1),
)
METADATA = st.lists(st.dictionaries(st.sampled_from("kn"), VALUES), min_size=1, max_size=40)
ORDERED_VALUES = VALUES.filter(lambda value: isinstance(value, (str, int, float)))
CONDITIONS = st.one_of(
    VALUES,
    st.dictionaries(st.sampled_from(["$eq", "$ne"]), VALUES, min_size=1),
    st.dictionaries(
        st.sampled_from(["$gt", "$gte", "$lt", "$lte"]), ORDERED_VALUES, min_size=1, max_size=2
    ),
    st.dictionaries(st.sampled_from(["$in", "$nin"]), st.lists(VALUES, max_size=3), min_size=1),
    st.fixed_dictionaries({"$contains": VALUES}),
)
FILTERS = st.recursive(
    st.dictionaries(st.sampled_from("knz"), CONDITIONS, min_size=1),
    lambda parts: st.one_of(
        st.fixed_dictionaries({"$not": parts}),
        st.dictionaries(
            st.sampled_from(["$and", "$or"]), st.lists(parts, min_size=1, max_size=3), min_size=1
        ),
    ),
    max_leaves=4,
)


def add(retriever: Any, metadata: list[Any], start: int = 0) -> None:
    names = [str(number) for number in range(start, start + len(metadata))]
    retriever.add(names, metadata, names)


def found(retriever: Any, where: Any) -> list[int]:
    return sorted(int(result.id) for result in retriever.search("0", 1_000, where=where))


def expected(metadata: list[Any], where: Any) -> list[int]:
    return [number for number, each in enumerate(metadata) if matches(each, where)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(metadata=METADATA, where=FILTERS)
@settings(max_examples=40, deadline=None)
def test_any_filter_finds_what_matches(kind: Any, metadata: list[Any], where: Any) -> None:
    """Among few documents, among many, of a saved index, and after more documents came."""
    many = (metadata * 600)[:600]
    with kind(MODEL) as few, kind(MODEL) as retriever, tempfile.TemporaryDirectory() as folder:
        add(few, metadata)
        assert found(few, where) == expected(metadata, where)
        add(retriever, many[:-30])
        assert found(retriever, where) == expected(many[:-30], where)
        retriever.save(Path(folder, "index"))
        retriever.load(Path(folder, "index"))
        assert found(retriever, where) == expected(many[:-30], where)
        add(retriever, many[-30:], 570)
        assert found(retriever, where) == expected(many, where)
        retriever.delete([str(number) for number in range(300)])
        left = [number for number in expected(many, where) if number >= 300]
        assert found(retriever, where) == left


SOME = [
    {"lang": "en", "year": 2001, "day": "2020-01-03", "tags": ["a"], "of": {"n": 1}},
    {"lang": "de", "year": 2005.5, "day": "2020-01-02"},
    {"lang": "fr", "year": "2005", "none": None},
    {"year": 2010},
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
    ({"of": {"n": True}}, []),
    ({}, [0, 1, 2, 3, 4]),
    (lambda metadata: metadata.get("year") in (2001, 2010) or not metadata, [0, 3, 4]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("repeated", [1, 120])
def test_filters_find_what_the_documentation_says(kind: Any, repeated: int) -> None:
    with kind(MODEL) as retriever:
        add(retriever, SOME * repeated)
        for where, wanted in WRITTEN_OUT:
            every = [5 * n + number for n in range(repeated) for number in wanted]
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
