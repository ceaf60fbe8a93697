"""Groups of many rows with equal vectors: a search looks at one row of each group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rag_demo.vectors import Mask, Pairs, Rows, Take

MANY = 32  # equal rows are a group; fewer are candidates like all others
_AT_ONCE = 1 << 10


def find_equal_rows(parts: Sequence[Any], take: Take) -> list[Rows]:
    """Find groups of many equal vectors, among those with equal first numbers.

    Groups may be missed where many different vectors begin alike. This only costs a search time.

    Args:
        parts: The vectors in order: tensors in host memory, shape (n, d) each.
        take: Returns a copy of the vectors of rows.

    Returns:
        The rows of each group, in ascending order.
    """
    first = np.concatenate([part[:, :2].numpy() for part in parts])
    keys = first.view(f"u{first.itemsize * first.shape[1]}")[:, 0]
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order], prepend=~keys[order[:1]], append=~keys[order[-1:]]))
    groups = []
    for run in np.flatnonzero(np.diff(edges) >= MANY).tolist():
        rows = order[edges[run] : edges[run + 1]]
        some = np.array_split(rows, len(rows) // _AT_ONCE + 1)
        vector = take(rows[:1])
        groups.append(np.concatenate([each[(take(each) == vector).all(axis=1)] for each in some]))
    return [group for group in groups if len(group) >= MANY]


def first_of_each(
    groups: Sequence[Rows], allowed: Mask | None, count: int
) -> tuple[Mask, dict[int, Rows]]:
    """Allow only the first row of each group.

    Args:
        groups: The groups.
        allowed: Which rows to search: shape (n,); None for all.
        count: How many rows there are.

    Returns:
        Which rows to search, and the allowed rows of each group by the first of them.
    """
    mask = np.ones(count, bool) if allowed is None else allowed.copy()
    present = [rows for group in groups if len(rows := group[mask[group]]) > 1]
    for rows in present:
        mask[rows[1:]] = False
    return mask, {int(rows[0]): rows for rows in present}


def with_equal_rows(
    pairs: Pairs, groups: Mapping[int, Rows], top_k: int, order_of: Callable[[Rows], Rows]
) -> Pairs:
    """Replace the first row of each group by the ``top_k`` first rows in the order of ties.

    Args:
        pairs: Pairs of a query and a row, with scores.
        groups: See `first_of_each`.
        top_k: How many rows of a group, at most.
        order_of: Returns numbers that order rows of equal score.
    """
    best = {
        row: groups[row][np.argsort(order_of(groups[row]), kind="stable")[:top_k]]
        for row in groups.keys() & set(pairs.row.tolist())
    }
    rows = [best.get(row, [row]) for row in pairs.row.tolist()]
    counts = list(map(len, rows))
    query, scores = np.repeat(pairs.query, counts), np.repeat(pairs.scores, counts)
    return Pairs(query, np.concatenate(rows), scores)
