"""Filters on metadata, applied inside of a search."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Where", "predicate"]

Where = Mapping[str, Any] | Callable[[Mapping[str, Any]], bool]
"""Wanted values by key (a set, list or tuple: any of them), or a function of the metadata."""


def predicate(where: Where) -> Callable[[Mapping[str, Any]], bool]:
    """Make a function of a filter, whatever its kind."""
    if callable(where):
        return where

    def matches(metadata: Mapping[str, Any]) -> bool:
        for key, wanted in where.items():
            if key not in metadata:
                return False
            if isinstance(wanted, (list, tuple, set, frozenset)):
                if metadata[key] not in wanted:
                    return False
            elif metadata[key] != wanted:
                return False
        return True

    return matches
