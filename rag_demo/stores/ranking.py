"""Ranking: two rankings become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rag_demo.searching.arguments import RANK_CONSTANT
from rag_demo.vectors import Rows

Order = Callable[[Rows], Rows]
"""Returns numbers that order documents by id, for documents that tie."""

Hit = TypeVar("Hit", bound=Any)
FUSED_FROM = 100  # of each ranking


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
