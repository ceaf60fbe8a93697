"""A search of a local store: by vectors, by full text, or by both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from rag_demo.documents.metadata import copied
from rag_demo.searching.results import SearchResult
from rag_demo.stores.filters import Where
from rag_demo.stores.ranking import (
    FUSED_FROM,
    Ranked,
    best_of_each,
    best_of_scores,
    best_scores,
    fused_scores,
    rank,
)
from rag_demo.stores.snapshot import Snapshot
from rag_demo.stores.words import best_span
from rag_demo.vectors import Mask, Rows, Vectors


def search(
    snapshot: Snapshot,
    queries: Sequence[str],
    vectors: Vectors | None,
    where: Where | None,
    top_k: int,
    mode: str,
    weights: tuple[float, float],
) -> list[list[SearchResult]]:
    """Return the answers to each query; see `rag_demo.stores.store.Store.search`."""
    allowed = snapshot.matching(where)
    count = snapshot.count if allowed is None else int(np.count_nonzero(allowed))
    if not count:
        return [[] for _ in queries]
    if mode == "bm25" or vectors is None:
        best = _by_words(snapshot, queries, allowed, top_k)
    elif mode == "dense":
        best = _by_vectors(snapshot, vectors, allowed, min(top_k, count))
    else:
        depth = max(top_k, FUSED_FROM)
        near = _by_vectors(snapshot, vectors, allowed, min(depth, count))
        worded = _by_words(snapshot, queries, allowed, depth)
        best = _fused(snapshot, near, worded, weights, top_k)
    return _results(snapshot, queries, best)


def _by_vectors(snapshot: Snapshot, queries: Vectors, allowed: Mask | None, wanted: int) -> Ranked:
    """Find the ``wanted`` best documents for each query by their vectors."""
    vectors, owners = snapshot.vectors, snapshot.owners.rows
    rows = None if allowed is None else snapshot.rows_of(allowed)
    if queries.shape[1] != vectors.dimension:
        raise ValueError(
            f"the query vectors have {queries.shape[1]} dimensions, "
            f"but the retriever has {vectors.dimension}"
        )
    available = len(vectors) if rows is None else int(np.count_nonzero(rows))
    depth = wanted
    while True:  # Until the rows belong to as many documents as are wanted.
        pairs = vectors.candidates(queries, depth, rows)
        ranked = rank(vectors.take, queries, pairs, depth,
                      lambda rows: snapshot.order_of(owners[rows]))  # fmt: skip
        best = best_of_each(ranked, owners[ranked.items]).first(wanted)
        if depth == available or (best.widths == wanted).all():
            return best
        depth = min(4 * depth, available)


def _by_words(
    snapshot: Snapshot, queries: Sequence[str], allowed: Mask | None, top_k: int
) -> Ranked:
    """Find the best documents for each query by full text."""
    snapshot.catch_up_words()
    counts = snapshot.alive.rows if allowed is None else allowed
    found = (snapshot.words.search(query, counts, top_k) for query in queries)
    return Ranked.join([best_scores(*each, top_k, snapshot.order_of) for each in found])


def _fused(
    snapshot: Snapshot, near: Ranked, worded: Ranked, weights: tuple[float, float], top_k: int
) -> Ranked:
    """Fuse the ranks by vectors and by full text."""
    assert near.rows is not None
    fused, rows = [], []
    for first, second in zip(near.each(), worded.each(), strict=True):
        items = near.items[first].tolist()
        scores = fused_scores([items, worded.items[second].tolist()], weights)
        fused.append(best_of_scores(scores, top_k, snapshot.order_of))
        row_of = dict(zip(items, near.rows[first].tolist(), strict=True))
        rows += [row_of.get(number, -1) for number in fused[-1][0].tolist()]
    joined = Ranked.join(fused)
    return Ranked(joined.starts, joined.items, joined.scores, np.asarray(rows, np.int64))


def _results(snapshot: Snapshot, queries: Sequence[str], best: Ranked) -> list[list[SearchResult]]:
    documents = snapshot.documents.get(best.items.tolist())
    if not documents:
        return [[] for _ in queries]
    places = np.arange(1, len(documents) + 1) - np.repeat(best.starts[:-1], best.widths)
    rows = np.full(len(documents), -1) if best.rows is None else best.rows
    spans = snapshot.spans.rows[rows].tolist()
    passages = [(a, b) if b and row >= 0 else None
                for (a, b), row in zip(spans, rows.tolist(), strict=True)]  # fmt: skip
    only_words = np.flatnonzero(rows < 0)
    spans_of = _spans_of(snapshot, best.items[only_words]) if len(only_words) else {}
    query_of = np.repeat(np.arange(len(queries)), best.widths)
    for place in only_words.tolist():
        if known := spans_of.get(int(best.items[place])):
            query, text = queries[query_of[place]], documents[place].text
            passages[place] = best_span(query, text, known, snapshot.words.language)
    ids, texts, metadata, _ = zip(*documents, strict=True)
    copies = map(copied, metadata)
    fields = zip(places.tolist(), best.scores.tolist(), ids, texts, copies, passages, strict=True)
    results = list(itertools.starmap(SearchResult, fields))
    return [results[part] for part in best.each()]


def _spans_of(snapshot: Snapshot, numbers: Rows) -> dict[int, list[tuple[int, int]]]:
    """Return the passages of documents that have any."""
    found = np.flatnonzero(np.isin(snapshot.owners.rows, numbers))
    spans = snapshot.spans.rows[found]
    spans_of: dict[int, list[tuple[int, int]]] = {}
    for owner, (start, stop) in zip(snapshot.owners.rows[found].tolist(), spans.tolist(),
                                    strict=True):  # fmt: skip
        if stop:
            spans_of.setdefault(owner, []).append((start, stop))
    return spans_of
