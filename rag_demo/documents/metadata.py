"""Metadata: plain JSON, which is checked and copied on its way in and on its way out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rag_demo.errors import shown

__all__ = ["checked_metadata", "copied"]

_MOST_BITS = 13_287  # of a whole number: 4,000 digits; Python refuses to write or read 4,300
_MOST_DEPTH = 100  # of lists and mappings in each other: what any reader of JSON takes


def checked_metadata(metadata: object, where: str) -> dict[str, Any]:
    """Copy metadata, all the way down.

    Args:
        metadata: A mapping.
        where: What it belongs to, for the message.

    Raises:
        TypeError: It is no mapping, or holds what JSON has not: another type, or a key that is
            no text.
        ValueError: It holds a number that is not finite, or is nested without an end.
    """
    if not isinstance(metadata, Mapping):
        raise TypeError(f"the metadata of {where} must be a mapping, not {shown(metadata)}")
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
            raise ValueError(f"the metadata of {where} hold {shown(value)}, which JSON has not")
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
                raise TypeError(f"the metadata of {where} have the key {shown(key)}: keys are text")
        return {str(key): _plain(value[key], where, depth + 1) for key in value}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, depth + 1) for item in value]
    raise TypeError(
        f"the metadata of {where} hold {shown(value)} of the type {kind.__name__}; "
        "JSON has text, numbers, true, false, null, lists and mappings"
    )


def copied(value: Any) -> Any:
    """Copy what is plain already; only lists and dictionaries can be changed."""
    kind = type(value)
    if kind is dict:
        return {key: copied(item) for key, item in value.items()} if value else {}
    if kind is list:
        return [copied(item) for item in value]
    return value
