"""Filters and metadata in PostgreSQL: jsonb that compares as `rag_demo.stores.filters` says."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from rag_demo.errors import UnstorableError, short_repr
from rag_demo.stores.filters import (
    COMPARISONS,
    All,
    Condition,
    Filter,
    Not,
    Where,
    encode,
    parse_filter,
)


def ensure_storable(value: str) -> str:
    """Return a string that Postgres can keep.

    Raises:
        UnstorableError: It contains NUL or lone surrogates.
    """
    if "\0" in value or value.encode("utf-8", "replace").decode() != value:
        raise UnstorableError(
            f"Postgres cannot keep {short_repr(value)}, which contains NUL or a lone surrogate; "
            "remove that character, or use an index in a folder"
        )
    return value


def fact(value: Any) -> Any:
    """Return a JSON value with one spelling for each number: 1 for 1.0.

    Raises:
        UnstorableError: See `ensure_storable`.
    """
    if isinstance(value, str):
        return ensure_storable(value)
    if isinstance(value, Mapping):
        return {ensure_storable(key): fact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [fact(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        code = encode(value)[1]
        if code in (math.inf, -math.inf):  # JSON has no infinity; this is beyond all metadata.
            return 10**4_001 if code > 0 else -(10**4_001)
        return int(code) if isinstance(code, float) and code.is_integer() else code
    return value


def compile_filter(where: Where | None) -> tuple[str, list[Any]]:
    """Return an SQL condition on the column ``facts``, and its parameters.

    Raises:
        TypeError: The filter is a function.
    """
    if callable(where):
        raise TypeError("where must be a mapping, because Postgres cannot call a function")
    return _compiled(parse_filter(where or {}))


def _compiled(part: Filter) -> tuple[str, list[Any]]:
    if isinstance(part, Condition):
        return _condition(part)
    if isinstance(part, Not):
        clause, values = _compiled(part.part)
        return f"NOT {clause}", values
    several = [_compiled(each) for each in part.parts]
    joined = (" AND " if isinstance(part, All) else " OR ").join(clause for clause, _ in several)
    return f"({joined or 'TRUE'})", [value for _, values in several for value in values]


def _condition(condition: Condition) -> tuple[str, list[Any]]:
    key, name, wanted = ensure_storable(condition.key), condition.operator, fact(condition.wanted)
    if name in COMPARISONS:
        if isinstance(wanted, bool):
            return "FALSE", []  # Only numbers and strings have an order.
        path = f"strict $.keyvalue() ? (@.key == $key && @.value {COMPARISONS[name]} $wanted)"
        return f"jsonb_path_exists(facts, '{path}', %s::jsonb, TRUE)", [
            json.dumps({"key": key, "wanted": wanted})
        ]
    several = wanted if name in ("$in", "$nin") else [wanted]
    codes = [json.dumps(each) for each in several if each == each]  # Nothing equals NaN.
    if name in ("$ne", "$nin"):
        return "(facts ? %s::text AND facts -> %s::text <> ALL(%s::jsonb[]))", [key, key, codes]
    if name == "$contains":
        items = "jsonb_path_query(facts -> %s::text, 'strict $[*]', silent => TRUE) item"
        clause = f"EXISTS (SELECT FROM {items} WHERE item = ANY(%s::jsonb[]))"
        if not isinstance(wanted, str):
            return clause, [key, codes]
        part = "jsonb_typeof(facts -> %s::text) = 'string' AND strpos(facts ->> %s::text, %s) > 0"
        return f"({clause} OR facts ? %s::text AND {part})", [key, codes, key, key, key, wanted]
    clause = "coalesce(facts -> %s::text = ANY(%s::jsonb[]), FALSE)"
    if len(codes) != 1:
        return clause, [key, codes]
    # An index of the metadata finds those that may match.
    prefilter = "facts @> jsonb_build_object(%s::text, %s::jsonb)"
    return f"({prefilter} AND {clause})", [key, *codes, key, codes]
