"""Results with the passages that stand before and after theirs in a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from rag_demo.reading.document import Document
from rag_demo.search_request import SearchResult
from rag_demo.stores.filters import Group, parse_filter
from rag_demo.stores.store import Store

_PASSAGE_ID = re.compile(r"(.*#)(\d+)(~*)", re.DOTALL)


def with_neighbors(
    store: Store, results: Sequence[SearchResult], count: int, where: Any = None
) -> list[SearchResult]:
    """Return results whose texts include the passages before and after them.

    Only the passages of a file have neighbors, which their ids and the keys "path", "start" and
    "stop" of their metadata tell. Between passages stand line ends, for what was not kept.

    Args:
        store: The store that has found the results.
        results: The results.
        count: How many passages to add on either side.
        where: The filter of the search, which neighbors must match too: parsed, or a function.

    Returns:
        The results; a ``passage`` is the place of what was found in the longer text.
    """

    @cache  # Several results may be of one file.
    def starts(path: str, prefix: str, tail: str) -> list[int]:
        inside: Any = parse_filter({"path": path})
        if callable(where):
            inside = lambda facts: facts.get("path") == path and where(facts)  # noqa: E731
        elif where is not None:
            inside = Group("$and", (inside, where))
        found = map(_PASSAGE_ID.fullmatch, store.matching(inside))
        parts = [each.groups() for each in found if each]
        return sorted(int(each[1]) for each in parts if (each[0], each[2]) == (prefix, tail))

    widened = []
    for result in results:
        parts = _PASSAGE_ID.fullmatch(result.id)
        path, bounds = result.metadata.get("path"), _bounds(result)
        if parts and isinstance(path, str) and bounds and str(bounds[0]) == parts[2]:
            all_starts = starts(path, parts[1], parts[3])
            if bounds[0] in all_starts:
                place = all_starts.index(bounds[0])
                some = all_starts[max(0, place - count) : place + count + 1]
                names = [f"{parts[1]}{each}{parts[3]}" for each in some]
                others = [each for each in store.get(names) if each and each.id != result.id]
                result = _joined(result, bounds, others)
        widened.append(result)
    return widened


def _bounds(passage: Document | SearchResult) -> tuple[int, int] | None:
    start, stop = passage.metadata.get("start"), passage.metadata.get("stop")
    return (start, stop) if isinstance(start, int) and isinstance(stop, int) else None


def _joined(result: SearchResult, own: tuple[int, int], others: Sequence[Document]) -> SearchResult:
    """Join a result and its neighbors. What two of them share, and repeated headers, are once."""
    text, end = "", -1
    pieces = [(bounds, each.text) for each in others if (bounds := _bounds(each))]
    for (start, stop), piece in sorted([*pieces, (own, result.text)]):
        header = len(piece) - (stop - start)  # of a table that goes on
        shared = max(0, end - start)
        if end >= 0:
            piece = piece[header + shared :]
            text += "\n" * min(2, max(0, start - end))
        if (start, stop) == own:
            shift = len(text) - shared - header if end >= 0 else 0
            first, last = result.passage or (0, len(result.text))
            place = max(len(text) - shared, first + shift), max(len(text), last + shift)
        text, end = text + piece, max(end, stop)
    return result._replace(text=text, passage=place)
