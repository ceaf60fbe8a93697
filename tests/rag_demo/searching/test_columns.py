"""Filters by column: the same documents as one by one, whatever the metadata."""

from __future__ import annotations

from datetime import date
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag_demo.documents.document import Document, Documents
from rag_demo.searching.column import Column
from rag_demo.searching.columns import Columns
from rag_demo.searching.filters import conditions_of, predicate

VALUES = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**53, 2**53 + 1, 2**63, -(2**70), 1.0, 0.5, -2.5, 1e300, True, False, None]),
    st.sampled_from(["", "a", "b", "ab", "é", "漢", "\ud800", "10", "9"]),
    st.lists(st.integers(0, 1), max_size=2),
    st.dictionaries(st.sampled_from("xy"), st.integers(0, 1), max_size=1),
)
METADATA = st.lists(st.dictionaries(st.sampled_from("kn"), VALUES), min_size=1, max_size=40)
OPERATORS = st.sampled_from(["$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$nin"])


@st.composite
def filters(draw: Any) -> dict[str, Any]:
    where: dict[str, Any] = {}
    for key in draw(st.sets(st.sampled_from("knz"), min_size=1)):
        name, value = draw(OPERATORS), draw(VALUES)
        if name in ("$in", "$nin"):
            where[key] = {name: draw(st.lists(VALUES, max_size=3))}
        elif name in ("$gt", "$gte", "$lt", "$lte"):
            where[key] = {name: draw(VALUES.filter(lambda v: isinstance(v, (str, int, float))))}
        else:
            where[key] = draw(st.sampled_from([{name: value}, value]))
    return where


@given(metadata=METADATA, where=filters(), split=st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_as_one_by_one(metadata: list[Any], where: dict[str, Any], split: int) -> None:
    """From columns in memory, from kept ones, from some that were added to, or thinned out."""
    expected = list(map(predicate(where), metadata))
    documents = [Document(str(n), "", each) for n, each in enumerate(metadata)]
    some = Documents().extended(documents[:split])
    import rag_demo.searching.columns as module

    before, module._ENOUGH = module._ENOUGH, 1
    try:
        columns = Columns()
        columns.matching(where, some)
        everything = some.extended(documents[split:])
        assert columns.matching(where, everything).tolist() == expected
        kept = Columns(Columns().derived(everything, 1 << 20))
        assert kept.matching(where, everything).tolist() == expected
        numbers = np.arange(0, len(metadata), 2)
        fewer = everything.kept(numbers)
        for each in (columns, Columns(Columns().derived(everything, 1 << 20))):
            assert each.kept(numbers).matching(where, fewer).tolist() == expected[::2]
    finally:
        module._ENOUGH = before


def test_a_column_of_anything_is_none() -> None:
    """Thousands of different lists are looked at one by one, and nothing is quadratic."""
    metadata = [{"tags": [n]} for n in range(2000)]
    assert Column.of("tags", metadata) is None
    table = Documents().extended(Document(str(n), "", each) for n, each in enumerate(metadata))
    found = Columns().matching({"tags": {"$eq": [7]}}, table)
    assert np.flatnonzero(found).tolist() == [7]


def test_numbers_of_numpy_and_ranges() -> None:
    """What programs have at hand; a range of dates as texts; a key nobody has."""
    metadata = [{"year": 2000 + n % 10, "day": f"2020-01-{n % 28 + 1:02}"} for n in range(600)]
    table = Documents().extended(Document(str(n), "", each) for n, each in enumerate(metadata))
    columns = Columns()
    for where, count in (
        ({"year": np.int64(2003)}, 60),
        ({"year": {"$gte": 2003, "$lt": 2005.5}}, 180),
        ({"year": [2001, np.int32(2002)]}, 120),
        ({"day": {"$lte": "2020-01-02"}}, 44),
        ({"year": float("nan")}, 0),
        ({"year": "2003"}, 0),
        ({"nobody": 1}, 0),
    ):
        assert columns.matching(where, table).sum() == count, where


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ({1: 2}, TypeError),
        (5, TypeError),
        ({"a": {"$near": 2}}, ValueError),
        ({"a": {"$gt": None}}, TypeError),
        ({"a": {"$in": "text"}}, TypeError),
        ({"$or": [{"a": 1}, {"b": 2}]}, ValueError),
        ({"$gt": 2}, ValueError),
        ({"a": {"gt": 2}}, ValueError),
        ({"a": b"text"}, TypeError),
        ({"a": range(3)}, TypeError),
        ({"a": np.arange(3)}, TypeError),
        ({"a": [date(2020, 1, 1)]}, TypeError),
    ],
)
def test_wrong_filters(where: Any, error: type[Exception]) -> None:
    """One clear error, not an empty answer."""
    with pytest.raises(error, match="where "):
        conditions_of(where)
