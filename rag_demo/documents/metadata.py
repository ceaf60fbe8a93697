"""Metadata are plain JSON. They are checked and copied when they go in and come out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rag_demo.errors import short_repr

_MOST_BITS = 13_287  # of an integer: 4,000 digits; Python refuses to convert more than 4,300
_MOST_DEPTH = 100  # of nested lists and mappings; every JSON reader accepts that many


def checked_metadata(metadata: object, where: str) -> dict[str, Any]:
    """Return a deep copy of metadata.

    Args:
        metadata: A mapping of JSON values.
        where: The document they belong to, for the error message.

    Raises:
        TypeError: They are not a mapping, or a key or value is not JSON.
        ValueError: A number is not finite or too long, or the nesting is too deep.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"the metadata of {where} must be a mapping, got {short_repr(metadata)}")
    plain: dict[str, Any] = _plain(metadata, where, 0)
    return plain


def _plain(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if kind is int and value.bit_length() > _MOST_BITS:
        raise ValueError(f"the metadata of {where} hold a number of more than 4,000 digits")
    if kind is str or value is None or kind is bool or kind is int:
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(
                f"the metadata of {where} hold {short_repr(value)}, which JSON does not have"
            )
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if depth > _MOST_DEPTH:
        raise ValueError(f"the metadata of {where} are nested more than {_MOST_DEPTH} deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(
                    f"the metadata of {where} have the key {short_repr(key)}; keys must be str"
                )
        return {str(key): _plain(value[key], where, depth + 1) for key in value}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    raise TypeError(
        f"the metadata of {where} hold {short_repr(value)} of the type {kind.__name__}; "
        "JSON has strings, numbers, true, false, null, lists and mappings"
    )


def copied(value: Any) -> Any:
    """Copy checked metadata. Only lists and dictionaries need a copy."""
    kind = type(value)
    if kind is dict:
        return {key: copied(item) for key, item in value.items()} if value else {}
    if kind is list:
        return [copied(item) for item in value]
    return value
