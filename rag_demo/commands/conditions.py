"""``--where``: conditions on metadata, as they are written on a command line."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

__all__ = ["condition_of"]

_CONDITION = re.compile(r"\s*([^=<>!]+?)\s*(<=|>=|!=|=|<|>)(.*)", re.DOTALL)
_ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def condition_of(conditions: Sequence[str]) -> Callable[[Mapping[str, Any]], bool] | None:
    """Make a filter of conditions that all have to hold; None of none.

    ``key=value``, ``!=``, ``<``, ``<=``, ``>``, ``>=``. A value is what it looks like in JSON (a
    number, true, false, null), or else a string; numbers are compared with numbers, strings
    with strings. Several values for ``=`` of one key are alternatives.

    Raises:
        click.BadParameter: One is none.
    """
    equal: dict[str, list[str]] = {}
    others: list[tuple[str, str, str]] = []
    for condition in conditions:
        found = _CONDITION.fullmatch(condition)
        if found is None:
            raise click.BadParameter(
                f"{condition!r} is no condition: --where takes KEY=VALUE, or !=, <, <=, >, >="
            )
        key, sign, value = found.groups()
        if sign == "=":
            equal.setdefault(key, []).append(value.strip())
        else:
            others.append((key, sign, value.strip()))
    if not conditions:
        return None

    def matches(metadata: Mapping[str, Any]) -> bool:
        for key, wanted in equal.items():
            if key not in metadata or not any(_is(metadata[key], value) for value in wanted):
                return False
        return all(_holds(metadata, *condition) for condition in others)

    return matches


def _holds(metadata: Mapping[str, Any], key: str, sign: str, value: str) -> bool:
    if sign == "!=":
        return key not in metadata or not _is(metadata[key], value)
    found = metadata.get(key)
    if isinstance(found, str):
        return _ORDERS[sign](found, value)
    wanted = _typed(value)
    return _is_number(found) and _is_number(wanted) and _ORDERS[sign](found, wanted)


def _is(found: Any, value: str) -> bool:
    """Whether a value of the metadata is what was written; true is not 1."""
    wanted = _typed(value)
    same_kind = isinstance(found, bool) == isinstance(wanted, bool)
    return found == value or (same_kind and bool(found == wanted))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _typed(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
