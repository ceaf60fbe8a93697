"""Ranking: candidates become ranked documents, and two rankings become one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rag_demo.exact_search.scores import Pairs, Scores, exact_scores
from rag_demo.searching.arguments import RANK_CONSTANT
from rag_demo.vectors import Mask, Rows, Vectors

Order = Callable[[Rows], Rows]
"""Returns numbers that order documents by id, for documents that tie."""

Hit = TypeVar("Hit", bound=Any)
FUSED_FROM = 100  # of each ranking


@dataclass(frozen=True)
class Ranked:
    """The best items of several queries, query after query, the best items first.

    Attributes:
        starts: Where the items of each query begin, and where the last ones end: shape (b + 1,).
        items: Rows or documents: shape (n,).
        scores: Shape (n,).
        rows: The row of each item's score, or -1: shape (n,).
    """

    starts: Rows
    items: Rows
    scores: Scores
    rows: Rows

    @classmethod
    def join(cls, several: Sequence[tuple[Rows, Scores]]) -> Ranked:
        """Join the items and scores of several queries, without rows."""
        starts = np.cumsum([0, *(len(items) for items, _ in several)])
        items = np.concatenate([items for items, _ in several] or [np.empty(0, np.int64)])
        scores = np.concatenate([scores for _, scores in several] or [np.empty(0)])
        return cls(starts, items, scores, np.full(len(items), -1))

    def each(self) -> Iterator[slice]:
        """Yield the places of each query's items."""
        return itertools.starmap(slice, itertools.pairwise(self.starts.tolist()))

    @property
    def widths(self) -> Rows:
        """How many items each query has: shape (b,)."""
        return self.starts[1:] - self.starts[:-1]

    def first(self, count: int) -> Ranked:
        """Keep the first ``count`` items of each query."""
        widths = self.widths
        if (widths <= count).all():
            return self
        places = np.arange(len(self.items)) - np.repeat(self.starts[:-1], widths)
        return self.only(places < count)

    def only(self, chosen: Mask) -> Ranked:
        """Keep the chosen items: shape (n,)."""
        starts = np.concatenate([[0], np.cumsum(chosen)])[self.starts]
        return Ranked(starts, self.items[chosen], self.scores[chosen], self.rows[chosen])


def rank(
    vectors_of: Callable[[Rows], Vectors],
    queries: Vectors,
    pairs: Pairs,
    top_k: int,
    order_of: Order,
) -> Ranked:
    """Order candidates by their exact scores.

    Args:
        vectors_of: Returns the vectors of rows: shape (p, d).
        queries: Shape (b, d).
        pairs: The candidates.
        top_k: How many rows of each query, at most.
        order_of: Orders rows that tie.

    Returns:
        The best rows of each query with their scores.
    """
    query, row, scores = pairs
    if scores is None:
        scores = exact_scores(vectors_of, queries, query, row)
    order = np.lexsort((-scores, query))
    row, scores = row[order], scores[order]
    starts = np.searchsorted(query, np.arange(len(queries) + 1))
    is_tie = (scores[1:] == scores[:-1]) & (query[1:] == query[:-1])
    is_among_best = np.arange(len(row) - 1) - starts[query[:-1]] < top_k
    if (is_tie & is_among_best).any():
        is_tie &= np.isin(query[:-1], query[:-1][is_tie & is_among_best])
        places = np.zeros(len(row), np.int64)
        tied = np.append(is_tie, False) | np.append(False, is_tie)
        places[tied] = order_of(row[tied])
        row = row[np.lexsort((row, places, -scores, query))]
    return Ranked(starts, row, scores, row).first(top_k)


def best_of_each(ranked: Ranked, owners: Rows) -> Ranked:
    """Turn rows into documents, and keep the best row of each document.

    Args:
        ranked: Rows.
        owners: The number of each row's document: shape (n,).
    """
    query = np.repeat(np.arange(len(ranked.starts) - 1), ranked.widths)
    # The first call of np.unique imports modules, which takes longer than a search.
    pair = query * (int(owners.max(initial=0)) + 1) + owners
    order = np.argsort(pair, kind="stable")
    chosen = np.zeros(len(owners), bool)
    chosen[order] = np.diff(pair[order], prepend=-1) != 0
    return Ranked(ranked.starts, owners, ranked.scores, ranked.rows).only(chosen)


def best_scores(numbers: Rows, scores: Scores, top_k: int, order_of: Order) -> tuple[Rows, Scores]:
    """Order documents by their scores, and equal scores by id.

    Args:
        numbers: The numbers of different documents: shape (n,).
        scores: Shape (n,).
        top_k: How many documents at most.
        order_of: Orders documents that tie.
    """
    if len(numbers) > top_k:
        kept = scores >= np.partition(scores, -top_k)[-top_k]
        numbers, scores = numbers[kept], scores[kept]
    best = np.lexsort((order_of(numbers), -scores))[:top_k]
    return numbers[best], scores[best]


def fused_scores(rankings: Sequence[Sequence[Any]], weights: Sequence[float]) -> dict[Any, float]:
    """Fuse rankings: an item's score is the sum of weight / (60 + rank) over the rankings.

    A ranking with the weight 0 adds no items.
    """
    scores: dict[Any, float] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for place, item in enumerate(ranking if weight else (), start=RANK_CONSTANT + 1):
            scores[item] = scores.get(item, 0.0) + weight / place
    return scores


def by_mode(
    mode: str,
    search: Callable[[str, int], list[list[Hit]]],
    weights: Sequence[float],
    top_k: int,
) -> list[list[Hit]]:
    """Search by vectors or by words, or by both, and fuse the two rankings of each query.

    Args:
        mode: "dense", "bm25" or "hybrid".
        search: Takes "dense" or "bm25", and how many results are wanted of each query. It returns
            named tuples with an ``id`` and a ``score``, the best first.
        weights: See `fused_scores`.
        top_k: How many results of each query, at most.
    """
    if mode != "hybrid":
        return search(mode, top_k)
    depth = max(top_k, FUSED_FROM)
    fused = []
    for near, worded in zip(search("dense", depth), search("bm25", depth), strict=True):
        known = {hit.id: hit for hit in (*worded, *near)}  # Those by vectors know their passage.
        scores = fused_scores([[hit.id for hit in near], [hit.id for hit in worded]], weights)
        best = sorted(scores, key=lambda name: (-scores[name], name))
        fused.append([known[name]._replace(score=scores[name]) for name in best[:top_k]])
    return fused
