"""``--where``: conditions on metadata, as they are written on a command line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import click

__all__ = ["parse_conditions"]

_CONDITION = re.compile(r"\s*([^=<>!]+?)\s*(<=|>=|!=|=|<|>)(?![=<>])(.*)", re.DOTALL)
_OPERATORS = {"<": "$lt", "<=": "$lte", ">": "$gt", ">=": "$gte"}


def parse_conditions(written: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """Make the filter of a search of conditions that all have to hold; None of none.

    ``key=value``, ``!=``, ``<``, ``<=``, ``>``, ``>=``. A value is what it looks like in JSON (a
    number, true, false), or else a string; for ``=`` and ``!=`` a string of that spelling is the
    same. Text that begins with a sign stands in quotes: ``==`` is a mistake. Several values for
    ``=`` of one key are alternatives.

    Raises:
        click.BadParameter: One is none, or two contradict each other.
    """
    where: dict[str, dict[str, Any]] = {}
    for condition in written:
        found = _CONDITION.fullmatch(condition)
        if found is None:
            raise click.BadParameter(
                f"{condition!r} is no condition: --where takes KEY=VALUE, or !=, <, <=, >, >=; "
                "a text that begins with a sign is put in double quotes"
            )
        key, sign, value = found[1], found[2], found[3].strip()
        if key.startswith("$"):
            raise click.BadParameter(f"{condition!r}: no key of metadata is {key!r}")
        wanted, of_key = _typed(value), where.setdefault(key, {})
        if sign in _OPERATORS:
            if _OPERATORS[sign] in of_key:
                raise click.BadParameter(f"{condition!r}: there is another {sign} for {key}")
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
