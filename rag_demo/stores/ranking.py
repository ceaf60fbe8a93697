"""Ranking: two rankings become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rag_demo.searching.arguments import RANK_CONSTANT
from rag_demo.vectors import Rows

Order = Callable[[Rows], Rows]
"""Returns numbers that order documents by id, for documents that tie."""

Hit = TypeVar("Hit", bound=Any)
_FUSED_FROM = 100  # of each ranking


def by_mode(
    mode: str,
    search: Callable[[str, int], list[list[Hit]]],
    weights: Sequence[float],
    top_k: int,
    order_of: Callable[[list[Any]], Sequence[Any]] = list,
) -> list[list[Hit]]:
    """Search by vectors or by words, or by both, and fuse the two rankings of each query.

    The fused score of a document is the sum of weight / (60 + rank) over the rankings. A ranking
    with the weight 0 adds no documents.

    Args:
        mode: "dense", "bm25" or "hybrid".
        search: Takes "dense" or "bm25", and how many results are wanted of each query. It returns
            named tuples with an ``id`` and a ``score``, the best first.
        weights: Of the ranks by vectors and by words.
        top_k: How many results of each query, at most.
        order_of: Returns what orders documents that tie, for a list of ids.
    """
    if mode != "hybrid":
        return search(mode, top_k)
    depth = max(top_k, _FUSED_FROM)
    fused = []
    for near, worded in zip(search("dense", depth), search("bm25", depth), strict=True):
        known = {hit.id: hit for hit in (*worded, *near)}  # Those by vectors know their passage.
        scores: dict[Any, float] = {}
        for hits, weight in zip((near, worded), weights, strict=True):
            for place, hit in enumerate(hits if weight else (), start=RANK_CONSTANT + 1):
                scores[hit.id] = scores.get(hit.id, 0.0) + weight / place
        least = min(sorted(scores.values(), reverse=True)[:top_k], default=0.0)
        best = [name for name in scores if scores[name] >= least]
        places = dict(zip(best, order_of(best), strict=True))
        best.sort(key=lambda name: (-scores[name], places[name]))
        fused.append([known[name]._replace(score=scores[name]) for name in best[:top_k]])
    return fused
