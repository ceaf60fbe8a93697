"""Results with the passages that stand before and after theirs in a file."""

from __future__ import annotations

from rag_demo.searching import SearchResult
from rag_demo.stores.store import Store


def with_neighbors(store: Store, result: SearchResult, count: int) -> SearchResult:
    """Return a result whose text includes the passages before and after it.

    Only the passages of a file have neighbors, which its ids and the keys "path", "start" and
    "stop" of its metadata tell. Between passages stand line ends, for what was not kept.

    Args:
        store: The store that has found the result.
        result: The result.
        count: How many passages to add on either side.

    Returns:
        The result; its ``passage`` is what was found, in the longer text.
    """
    prefix = f"{result.id.rpartition('#')[0]}#"
    path, start = result.metadata.get("path"), result.metadata.get("start")
    if not isinstance(path, str) or not isinstance(start, int) or result.id != f"{prefix}{start}":
        return result
    names = store.matching({"path": path})
    numbers = [each.removeprefix(prefix) for each in names if each.startswith(prefix)]
    starts = sorted(int(each) for each in numbers if each.isdecimal())
    place = starts.index(start) if start in starts else 0
    some = starts[max(0, place - count) : place + count + 1]
    text, end = "", -1
    first, last = result.passage or (0, len(result.text))
    for document in store.get([f"{prefix}{each}" for each in some]):
        known = {} if document is None else document.metadata
        begin, stop = known.get("start"), known.get("stop")
        if document is None or not isinstance(begin, int) or not isinstance(stop, int):
            continue  # Another thread has just changed it.
        piece = document.text
        if end >= 0:
            # Without what both have, and without the header of a table that goes on.
            piece = piece[max(0, len(piece) - (stop - max(begin, end))) :]
            text += "\n" * min(2, max(0, begin - end))
        if document.id == result.id:
            shift = len(text) - (len(document.text) - len(piece))
            first, last = max(len(text), first + shift), last + shift
        text, end = text + piece, stop
    return result._replace(text=text, passage=(first, last)) if text else result
