"""``--where``: conditions on metadata, as they are written on a command line."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from rag_demo.commands.options import open_saved, warn

_CONDITION = re.compile(r"\s*([^=<>!~]+?)\s*(<=|>=|!=|=|<|>|~)(?![=<>~])(.*)", re.DOTALL)
_OPERATORS = {"<": "$lt", "<=": "$lte", ">": "$gt", ">=": "$gte", "~": "$contains"}


def where_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option ``--where`` with a help text."""
    return click.option("--where", "conditions", multiple=True, metavar="CONDITION", help=text)


def parse_conditions(conditions: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """Make a filter of conditions that must all hold. Without conditions, return None.

    The operators are ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=`` and ``~``: a list has the value,
    or a string contains it. A value is read as JSON (a number, true, false), or else as a string.
    With ``=`` and ``!=`` it also matches the string of its spelling. A string that begins with an
    operator must be in double quotes. Several values for ``=`` of one key are alternatives.

    Raises:
        click.BadParameter: A condition is invalid, or two conditions conflict.
    """
    where: dict[str, dict[str, Any]] = {}
    for condition in conditions:
        found = _CONDITION.fullmatch(condition)
        if found is None:
            raise click.BadParameter(
                f"{condition!r} is not a condition; write KEY=VALUE, or !=, <, <=, >, >=, ~; "
                "put a value that begins with an operator in double quotes"
            )
        key, sign, value = found[1], found[2], found[3].strip()
        if not value and sign in _OPERATORS:
            raise click.BadParameter(f"{condition!r} has no value after {sign}")
        if key.startswith("$"):
            raise click.BadParameter(f"{condition!r}: a key of metadata cannot be {key!r}")
        wanted, of_key = _typed(value), where.setdefault(key, {})
        if sign in _OPERATORS:
            if _OPERATORS[sign] in of_key:
                raise click.BadParameter(
                    f"{condition!r}: --where has two conditions with {sign} for {key!r}; keep one"
                )
            of_key[_OPERATORS[sign]] = wanted
        else:
            of_key.setdefault("$in" if sign == "=" else "$nin", []).extend({wanted, value})
    return where or None


def _typed(value: str) -> str | int | float | bool:
    try:
        typed = json.loads(value, parse_constant=str)  # NaN is a text.
    except (ValueError, RecursionError):
        return value
    return typed if isinstance(typed, (str, int, float)) else value


def explain(where: Mapping[str, Mapping[str, Any]], places: Sequence[Any]) -> None:
    """Warn of conditions that no document of some indexes can fulfil."""
    from rag_demo.stores.filters import COMPARISONS, TEXT, encode

    kinds: dict[str, set[int]] = {}
    for place in places:
        with contextlib.closing(open_saved(place)) as saved:
            for key, found in saved.kinds().items():
                kinds[key] = kinds.get(key, set()) | found
    for key, conditions in where.items():
        if key not in kinds:
            known = ", ".join(sorted(kinds))
            keys = f"the keys are: {known}" if kinds else "the documents have no metadata"
            warn(f"no document has the metadata key {key!r}; {keys}")
            continue
        for name, wanted in conditions.items():
            is_text = name in COMPARISONS and encode(wanted)[0] == TEXT
            if is_text and TEXT not in kinds[key]:
                warn(f"{key!r} is compared with {wanted!r}, but no document has text there")
