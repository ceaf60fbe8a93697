"""Filters on metadata, applied inside of a search."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import numpy as np

from rag_demo.errors import shown

__all__ = ["OPERATORS", "Condition", "Where", "conditions_of", "fulfils", "predicate"]

Where = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool]
"""Wanted values by key, all of which must match, or a function of the metadata.

A value matches what equals it; a set, list or tuple any of its items; and a mapping of operators,
such as ``{"$gte": 2000, "$lt": 2010}``, what fulfils all of them: ``$eq``, ``$ne``, ``$gt``,
``$gte``, ``$lt``, ``$lte``, ``$in``, ``$nin``. Numbers are compared with numbers and texts with
texts; a document without the key never matches. What no document can match, such as an operator
in place of a key, is an error: for "or" and "not" there are functions.
"""

Condition = tuple[str, str, Any]  # a key, an operator, and what the value is compared with

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}
OPERATORS = ("$eq", "$ne", *_COMPARE, "$in", "$nin")
_WITHOUT_MARK = frozenset(name[1:] for name in OPERATORS)


def conditions_of(where: Mapping[str, Any]) -> list[Condition]:
    """Take a mapping apart.

    Raises:
        TypeError: A key is no text, or a value is none that metadata could have, or that the
            operator could be compared with.
        ValueError: There is no such operator.
    """
    if not isinstance(where, Mapping):
        raise TypeError(f"where must be a mapping or a function, not {shown(where)}")
    conditions: list[Condition] = []
    for key, wanted in where.items():
        if not isinstance(key, str):
            raise TypeError(f"where has the key {shown(key)}: keys of metadata are text")
        if key.startswith("$"):
            raise ValueError(
                f"where has {shown(key)} for a key: give a function of metadata; "
                f"below a key stand {', '.join(OPERATORS)}"
            )
        if isinstance(wanted, Mapping) and any(str(name).startswith("$") for name in wanted):
            for name, value in wanted.items():
                if name not in OPERATORS:
                    raise ValueError(f"where has {shown(name)}: use one of {', '.join(OPERATORS)}")
                if name in _COMPARE and not isinstance(_plain(key, value), (str, int, float)):
                    raise TypeError(
                        f"where compares {shown(key)} with {shown(value)}: no text, no number"
                    )
                if name in ("$in", "$nin") and not isinstance(value, (list, tuple, set, frozenset)):
                    raise TypeError(f"where has {name} with {shown(value)}: it takes a list")
                conditions.append((key, name, _plain(key, value)))
        elif isinstance(wanted, Mapping) and wanted and _WITHOUT_MARK.issuperset(wanted):
            name = next(iter(wanted))
            raise ValueError(
                f"where has {shown(name)} for {shown(key)}: the operator is written ${name}"
            )
        elif isinstance(wanted, (list, tuple, set, frozenset)):
            conditions.append((key, "$in", _plain(key, wanted)))
        else:
            conditions.append((key, "$eq", _plain(key, wanted)))
    return conditions


def _plain(key: str, value: Any) -> Any:
    """Turn numpy's numbers into Python's; refuse what metadata never are."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(key, each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (str, int, float, Number, Mapping)):
        return value
    raise TypeError(
        f"where compares {shown(key)} with {shown(value)}, which is not JSON, as metadata are"
    )


def fulfils(value: Any, name: str, wanted: Any) -> bool:
    """Whether a value is what a condition wants."""
    if name in _COMPARE:
        both_text = isinstance(value, str) and isinstance(wanted, str)
        both_numbers = isinstance(value, (int, float)) and isinstance(wanted, (int, float))
        return (both_text or both_numbers) and _COMPARE[name](value, wanted)
    if name in ("$in", "$nin"):
        return any(value == each for each in wanted) is (name == "$in")
    return bool(value == wanted) is (name == "$eq")


def predicate(where: Where) -> Callable[[Mapping[str, Any]], bool]:
    """Make a function of a filter, whatever its kind."""
    if callable(where):
        return where
    conditions = conditions_of(where)

    def matches(metadata: Mapping[str, Any]) -> bool:
        return all(
            key in metadata and fulfils(metadata[key], name, wanted)
            for key, name, wanted in conditions
        )

    return matches
