"""Metadata filters: parsed once, then answered by a database."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rag_demo.errors import short_repr
from rag_demo.reading.document import plain_scalar

COMPARISONS = {"$gt": ">", "$gte": ">=", "$lt": "<", "$lte": "<="}
"""Operators of values that have an order, in SQL."""
OPERATORS = ("$eq", "$ne", *COMPARISONS, "$in", "$nin", "$contains", "$exists")
ID = "$id"
"""The key that stands for the document's id."""
_MOST_DEPTH = 50  # of nested $and, $or and $not
_LOGICAL = ("$and", "$or", "$not")

NUMBER, TEXT, BOOLEAN, NULL, JSON = range(5)
Encoded = tuple[int, Any]
"""The kind of a value and the code that is compared; equal values have equal codes."""


class Condition(NamedTuple):
    """One key compared with one value, or with a list by ``$in``.

    Other operators are ``$contains``, ``$exists`` and those of `COMPARISONS`.
    """

    key: str
    operator: str
    wanted: Any


class Group(NamedTuple):
    """Filters of which all must hold (``$and``), at least one (``$or``), or the one not (``$not``).

    ``$and`` without parts holds.
    """

    operator: str
    parts: tuple[Condition | Group, ...]


Filter = Condition | Group

Where = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool] | Group
"""A mapping of conditions that must all hold, parsed or not, or a function of metadata.

``{"lang": "en"}`` compares a value, ``{"lang": ["en", "de"]}`` accepts any of several, and
``{"year": {"$gte": 2000, "$lt": 2010}}`` applies operators: ``$eq``, ``$ne``, ``$gt``, ``$gte``,
``$lt``, ``$lte``, ``$in``, ``$nin``, ``$contains`` (a list has this item, or a string this
part) and ``$exists``. The key ``"a.b"`` is the key b of the mapping a, and ``"$id"`` the document's
id. ``{"$and": [...]}`` and ``{"$or": [...]}`` combine filters, and ``{"$not": {...}}`` negates
one. Numbers are compared with numbers and strings with strings; ``True`` does not equal ``1``.
Dates are compared as text, as in ISO 8601. A condition never holds for a document without its key,
except ``{"$exists": False}``.
"""


def encode(value: Any) -> Encoded:
    """Return the kind of a JSON value, and a code that SQLite can store and compare.

    Integers of more than 64 bits are compared as floats.
    """
    if isinstance(value, bool):
        return BOOLEAN, int(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return NUMBER, float(str(value))  # Infinity if it is too large.
    if isinstance(value, (int, float)):
        return NUMBER, value + 0  # -0.0 is 0.0
    if isinstance(value, str):
        return TEXT, value
    if value is None:
        return NULL, 0
    return JSON, json.dumps(_with_few_kinds(value), sort_keys=True)


def _with_few_kinds(value: Any) -> Any:
    """Return a value in which equal numbers have one spelling."""
    if isinstance(value, dict):
        return {key: _with_few_kinds(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_few_kinds(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_filter(where: Mapping[str, Any] | Group, depth: int = 0) -> Group:
    """Check a filter and return its parts; what was parsed before is returned as it is.

    Raises:
        TypeError: A key is not str, or a value cannot be compared.
        ValueError: An operator is unknown or misplaced, or the nesting is too deep.
    """
    if isinstance(where, Group):
        return where
    if depth > _MOST_DEPTH:
        raise ValueError(f"where has filters nested more than {_MOST_DEPTH} deep")
    if not isinstance(where, Mapping):
        raise TypeError(f"where must be a mapping or one function, got {short_repr(where)}")
    parts: list[Filter] = []
    for key, wanted in where.items():
        if not isinstance(key, str):
            raise TypeError(f"where has the key {short_repr(key)}; keys must be str")
        if key in _LOGICAL:
            parts.append(_logical(key, wanted, depth + 1))
        elif key.startswith("$") and key != ID:
            logical, compared = ", ".join(_LOGICAL), ", ".join(OPERATORS)
            raise ValueError(
                f"where has the unknown operator {short_repr(key)}; combine filters with "
                f"{logical}, and compare the value of a metadata key with {compared}"
            )
        else:
            parts += _conditions(key, wanted)
    return Group("$and", tuple(parts))


def _logical(name: str, wanted: Any, depth: int) -> Filter:
    if name == "$not":
        wanted = [wanted]
    if not isinstance(wanted, (list, tuple)) or not wanted:
        raise TypeError(f"{name} in where must have a list of filters, got {short_repr(wanted)}")
    return Group(name, tuple(parse_filter(each, depth) for each in wanted))


def _conditions(key: str, wanted: Any) -> list[Filter]:
    is_mapping = isinstance(wanted, Mapping)
    if not is_mapping or not any(str(name).startswith("$") for name in wanted):
        if is_mapping and wanted and {f"${name}" for name in wanted}.issubset(OPERATORS):
            name = next(iter(wanted))
            raise ValueError(f"where uses {name!r} for {short_repr(key)}; write ${name}")
        is_several = isinstance(wanted, (list, tuple, set, frozenset))
        wanted = {"$in" if is_several else "$eq": wanted}
    parts: list[Filter] = []
    for name, value in wanted.items():
        if name not in OPERATORS:
            known = ", ".join(OPERATORS)
            raise ValueError(f"where has the unknown operator {short_repr(name)}; use {known}")
        plain, what = _plain(key, value), ""
        if name in COMPARISONS and encode(plain)[0] not in (NUMBER, TEXT, BOOLEAN):
            what = "a number or a string"
        elif name in ("$in", "$nin") and not isinstance(plain, list):
            what = "a list"
        elif name == "$exists" and not isinstance(plain, bool):
            what = "True or False"
        if what:
            raise TypeError(f"{name} in where must have {what}, got {short_repr(value)}")
        parts.append(_by_few_operators(key, name, plain))
    return parts


def _by_few_operators(key: str, name: str, wanted: Any) -> Filter:
    """Express a condition by ``$in``, ``$contains``, ``$exists`` and comparisons alone."""
    exists = Condition(key, "$exists", True)
    if name == "$exists":
        return exists if wanted else Group("$not", (exists,))
    if name in ("$eq", "$ne"):
        wanted = [wanted]
    if name in ("$ne", "$nin"):  # It never holds for a document without the key.
        return Group("$and", (exists, Group("$not", (Condition(key, "$in", wanted),))))
    return Condition(key, "$in" if name == "$eq" else name, wanted)


def _plain(key: str, value: Any) -> Any:
    """Turn sets, scalars of numpy and dates into JSON values; refuse everything else."""

    try:
        return json.loads(json.dumps(value, default=_json_value))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"where compares {short_repr(key)} with a wrong value: {error}") from None


def _json_value(value: Any) -> Any:
    return list(value) if isinstance(value, (set, frozenset)) else plain_scalar(value)
