"""Candidates into ranked documents, and two rankings into one.

Scores are computed so that nothing else decides the order.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rag_demo.documents.rows import DocumentRows, Span
from rag_demo.vectors import Rows, Vectors

__all__ = ["FUSED_FROM", "Found", "Hit", "Pairs", "best_of_each", "fuse", "rank"]

Pairs = tuple[Rows, Rows]
Hit = tuple[int, float]  # a row and its score
Found = tuple[int, float, Span | None]  # a document, its score, the span that scored

_PAIRS = 512  # scored at once: 1.5 MB of vectors
FUSED_FROM = 100  # of each ranking
_RANK_CONSTANT = 60  # Cormack, Clarke and Buettcher, SIGIR 2009


def rank(
    vectors_of: Callable[[Rows], Vectors],
    queries: Vectors,
    pairs: Pairs,
    top_k: int,
    name_of: Callable[[int], str],
) -> list[list[Hit]]:
    """Score candidates again, each by itself and in float64, and order them.

    How a matrix product rounds depends on its shape and on the count of threads; this does
    not, so neither do scores, ties and the order of the answers.

    Args:
        vectors_of: Returns the vectors of rows: shape (p, d).
        queries: Shape (b, d).
        pairs: Which query each candidate is for, sorted: shape (p,). And the candidates' rows.
        top_k: How many at most.
        name_of: Returns the name of a row, by which ties are ordered.

    Returns:
        For each query the best rows with their scores.
    """
    query, row = pairs
    scores = np.empty(len(row))
    for start in range(0, len(row), _PAIRS):
        some = slice(start, start + _PAIRS)
        vectors = vectors_of(row[some]).astype(np.float64)
        scores[some] = (vectors * queries[query[some]]).sum(axis=1)
    order = np.lexsort((-scores, query))
    row, scores = row[order], scores[order]
    starts = np.searchsorted(query, np.arange(len(queries) + 1))
    ranked: list[list[Hit]] = []
    for start, stop in itertools.pairwise(starts.tolist()):
        its_scores = scores[start:stop].tolist()
        hits = list(zip(row[start:stop].tolist(), its_scores, strict=True))
        if any(map(operator.eq, its_scores[: top_k + 1], its_scores[1 : top_k + 1])):
            hits.sort(key=lambda hit: (-hit[1], name_of(hit[0]), hit[0]))
        ranked.append(hits[:top_k])
    return ranked


def best_of_each(hits: list[Hit], document_rows: DocumentRows) -> list[Found]:
    """Leave only the best row of each document: its passages and its whole count as one."""
    if document_rows.are_whole:
        return [(row, score, None) for row, score in hits]
    owners = document_rows.owners(np.asarray([row for row, _ in hits], np.int64)).tolist()
    best: dict[int, Found] = {}
    for owner, (row, score) in zip(owners, hits, strict=True):
        if owner not in best:
            best[owner] = owner, score, document_rows.span(row)
    return list(best.values())


def fuse(rankings: Sequence[Sequence[Any]], top_k: int) -> list[tuple[Any, float]]:
    """Fuse rankings: each item gets the sum of 1 / (60 + its rank) over them.

    Returns:
        The best items with their scores; of equal scores the smaller item first.
    """
    scores: dict[Any, float] = {}
    for ranking in rankings:
        for rank, item in enumerate(ranking, start=1):
            scores[item] = scores.get(item, 0.0) + 1 / (_RANK_CONSTANT + rank)
    return sorted(scores.items(), key=lambda entry: (-entry[1], entry[0]))[:top_k]
