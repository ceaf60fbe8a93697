"""``--where``: conditions on metadata, as they are written on a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

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
        typed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return typed if isinstance(typed, (str, int, float)) else value
