"""Groups of many rows with equal vectors: a search looks at one row of each group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rag_demo.exact_search.scores import Pairs
from rag_demo.vectors import Mask, Rows, Vectors

MANY = 32  # equal rows are a group; fewer are candidates like all others
_AT_ONCE = 1 << 10


class EqualRows(NamedTuple):
    """The groups among the first rows.

    Attributes:
        compared: How many rows were compared.
        groups: The rows of each group, in ascending order.
    """

    compared: int = 0
    groups: Sequence[Rows] = ()


NO_GROUPS = EqualRows()


def find_equal_rows(parts: Sequence[Vectors], take: Callable[[Rows], Vectors]) -> EqualRows:
    """Find groups of many equal vectors, among those with equal first numbers.

    Groups may be missed where many different vectors begin alike. This only costs a search time.

    Args:
        parts: The vectors in order, shape (n, d) each.
        take: Returns a copy of the vectors of rows.
    """
    first = np.concatenate([np.ascontiguousarray(part[:, :2]) for part in parts])
    keys = first.view(np.uint64 if first.shape[1] == 2 else np.uint32)[:, 0]
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order], prepend=~keys[order[:1]], append=~keys[order[-1:]]))
    groups = []
    for run in np.flatnonzero(np.diff(edges) >= MANY).tolist():
        rows = order[edges[run] : edges[run + 1]]
        bits = take(rows[:1]).view(np.uint32)
        some = [rows[start : start + _AT_ONCE] for start in range(0, len(rows), _AT_ONCE)]
        equal = [part[(take(part).view(np.uint32) == bits).all(axis=1)] for part in some]
        groups.append(np.concatenate(equal))
    return EqualRows(len(keys), [group for group in groups if len(group) >= MANY])


def without_equal_rows(
    equal: EqualRows, allowed: Mask | None, count: int
) -> tuple[Mask, list[Rows]]:
    """Allow only the first row of each group.

    Args:
        equal: The groups.
        allowed: Which rows to search: shape (n,); None for all.
        count: How many rows there are.

    Returns:
        Which rows to search, and the allowed rows of each group.
    """
    mask = np.ones(count, bool) if allowed is None else allowed.copy()
    groups = [group[mask[group]] for group in equal.groups]
    for group in groups:
        mask[group[1:]] = False
    return mask, [group for group in groups if len(group) > 1]


def with_equal_rows(
    pairs: Pairs, groups: Sequence[Rows], top_k: int, order_of: Callable[[Rows], Rows]
) -> Pairs:
    """Replace the first row of each group by the ``top_k`` first rows in the order of ties.

    Args:
        pairs: Pairs of a query and a row, with scores.
        groups: See `without_equal_rows`.
        top_k: How many rows of a group, at most.
        order_of: Returns numbers that order rows of equal score.
    """
    found = set(pairs.row.tolist())
    groups = [group for group in groups if group[0] in found]
    if not groups or pairs.scores is None:
        return pairs
    ends = np.cumsum([len(group) for group in groups])
    orders = np.split(order_of(np.concatenate(groups)), ends[:-1])
    rows_of = {int(group[0]): group[np.lexsort((group, order))[:top_k]]
               for group, order in zip(groups, orders, strict=True)}  # fmt: skip
    rows = [rows_of.get(row, np.array([row])) for row in pairs.row.tolist()]
    counts = [len(each) for each in rows]
    query, scores = np.repeat(pairs.query, counts), np.repeat(pairs.scores, counts)
    return Pairs(query, np.concatenate(rows), scores)
