"""Metadata as clients see it, without the folders of this machine."""

from __future__ import annotations

import ntpath
import posixpath
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rag_demo.store.filters import Where, predicate

__all__ = ["PublicFilters", "public_metadata"]

_PATH_KEYS = frozenset({"path", "source", "file"})


def public_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with absolute paths cut to the file's name."""
    public = dict(metadata)
    for key in _PATH_KEYS.intersection(public):
        value = public[key]
        if isinstance(value, str) and (posixpath.isabs(value) or ntpath.splitdrive(value)[0]):
            public[key] = ntpath.basename(value)
    return public


class PublicFilters:
    """Filters that compare public metadata: others would tell a folder, guess by guess.

    A filter on a path is a function, which is slow, until one search has shown that the index
    has no absolute paths under its keys.
    """

    def __init__(self) -> None:
        self._safe_keys: set[str] = set()

    def apply(self, where: Mapping[str, Any]) -> tuple[Where, Callable[[], None]]:
        """Return the filter to search with, and a function to call when the search is done."""
        keys = _PATH_KEYS.intersection(_keys(where)) - self._safe_keys
        if not keys:
            return where, lambda: None
        matches = predicate(where)
        unsafe: set[str] = set()

        def matches_public(metadata: Mapping[str, Any]) -> bool:
            public = public_metadata(metadata)
            unsafe.update(key for key in keys if public.get(key) != metadata.get(key))
            return matches(public)

        return matches_public, lambda: self._safe_keys.update(keys - unsafe)


def _keys(where: Mapping[str, Any]) -> Iterator[str]:
    for key, value in where.items():
        if key in ("$and", "$or"):
            for part in value:
                yield from _keys(part)
        elif key == "$not":
            yield from _keys(value)
        else:
            yield key
