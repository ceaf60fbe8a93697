"""What clients see of a document's metadata, and what their filters compare: the same.

Folders of this machine are not shown. A filter that compared them would tell them, too: letter by
letter, to whoever asks for what is "greater than" a guess.
"""

from __future__ import annotations

import ntpath
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

from rag_demo.store.filters import Where, predicate

__all__ = ["Shown", "shown_metadata"]

_PLACES = ("path", "source", "file")


def _shown(value: Any) -> Any:
    if isinstance(value, str) and (posixpath.isabs(value) or ntpath.splitdrive(value)[0]):
        return ntpath.basename(value)
    return value


def shown_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a document, without the folders of this machine."""
    shown = dict(metadata)
    for key in _PLACES:
        if key in shown:
            shown[key] = _shown(shown[key])
    return shown


class Shown:
    """Filters of what is shown of one index's documents.

    Where a key that may hide something hid nothing in any document, the filter itself is as good,
    and quicker: it looks into columns, where a function looks into each document.
    """

    def __init__(self) -> None:
        self._hide_nothing: set[str] = set()

    def filter(self, where: Where | None) -> tuple[Where | None, Callable[[], None]]:
        """Make the filter for a search.

        Returns:
            The filter, and what is to be called when all documents have passed it.
        """
        if where is None:
            return None, lambda: None
        asked = set(_PLACES) if callable(where) else set(_PLACES).intersection(where)
        asked -= self._hide_nothing
        if not asked:
            return where, lambda: None
        matches = predicate(where)
        hiding: set[str] = set()

        def shown_matches(metadata: Mapping[str, Any]) -> bool:
            shown = shown_metadata(metadata)
            hiding.update(key for key in asked if key in shown and shown[key] != metadata[key])
            return matches(shown)

        return shown_matches, lambda: self._hide_nothing.update(asked - hiding)
