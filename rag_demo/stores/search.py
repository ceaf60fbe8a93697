"""A search of a retriever's snapshot: by vectors, by full text, or by both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rag_demo.documents.document import Document
from rag_demo.documents.metadata import copied
from rag_demo.searching.results import SearchResult
from rag_demo.stores.filters import Where
from rag_demo.stores.ranking import FUSED_FROM, Ranked, best_of_each, best_scores, fuse, rank
from rag_demo.stores.snapshot import Snapshot
from rag_demo.stores.words import stems_of
from rag_demo.vectors import Mask, Vectors


@dataclass(frozen=True)
class Search:
    """Queries and the options of their search; see `rag_demo.Retriever.search`.

    Attributes:
        queries: The queries.
        vectors: Their vectors: shape (b, d); None if only the full text is searched.
        top_k: How many answers at most.
        where: The filter that documents must match.
        mode: One of `rag_demo.searching.arguments.MODES`.
        weights: Of the ranks by vectors and by full text.
    """

    queries: Sequence[str]
    vectors: Vectors | None
    top_k: int
    where: Where | None
    mode: str
    weights: tuple[float, float] = (1.0, 1.0)

    def run(self, snapshot: Snapshot) -> list[list[SearchResult]]:
        """Return the answers to each query."""
        allowed = snapshot.matching(self.where)
        count = snapshot.count if allowed is None else int(np.count_nonzero(allowed))
        if not count:
            return [[] for _ in self.queries]
        if self.mode == "bm25":
            best = self._by_text(snapshot, allowed, self.top_k)
        elif self.mode == "dense":
            best = self._by_vectors(snapshot, allowed, min(self.top_k, count))
        else:
            best = self._by_both(snapshot, allowed, count)
        return _results(self.queries, best, snapshot)

    def _by_vectors(self, snapshot: Snapshot, allowed: Mask | None, wanted: int) -> Ranked:
        """Find the ``wanted`` best documents for each query by their vectors."""
        assert self.vectors is not None
        vectors = snapshot.vectors
        rows = None if allowed is None else snapshot.rows_of(allowed)
        if self.vectors.shape[1] != vectors.dimension:
            raise ValueError(
                f"the query vectors have {self.vectors.shape[1]} dimensions, "
                f"but the retriever has {vectors.dimension}"
            )
        available = len(vectors) if rows is None else int(np.count_nonzero(rows))
        owners = snapshot.owners.rows
        depth = wanted
        while True:  # Until the rows belong to as many documents as are wanted.
            pairs = vectors.candidates(self.vectors, depth, rows)
            ranked = rank(vectors.take, self.vectors, pairs, depth,
                          lambda rows: snapshot.order_of(owners[rows]))  # fmt: skip
            best = best_of_each(ranked, owners[ranked.items]).first(wanted)
            if depth == available or (best.widths == wanted).all():
                return best
            depth = min(4 * depth, available)

    def _by_text(self, snapshot: Snapshot, allowed: Mask | None, top_k: int) -> Ranked:
        """Find the best documents for each query by full text."""
        return Ranked.join(
            [
                best_scores(*snapshot.search_text(query, allowed, top_k), top_k, snapshot.order_of)
                for query in self.queries
            ]
        )

    def _by_both(self, snapshot: Snapshot, allowed: Mask | None, count: int) -> Ranked:
        """Find the best documents by vectors and by full text, and fuse their ranks."""
        depth = max(self.top_k, FUSED_FROM)
        by_vectors = self._by_vectors(snapshot, allowed, min(depth, count))
        by_text = self._by_text(snapshot, allowed, depth)
        assert by_vectors.rows is not None
        fused, rows = [], []
        for first, second in zip(by_vectors.each(), by_text.each(), strict=True):
            items = by_vectors.items[first]
            rankings = [items, by_text.items[second]]
            best = fuse(rankings, self.weights, self.top_k, snapshot.order_of)
            fused.append(best)
            row_of = dict(zip(items.tolist(), by_vectors.rows[first].tolist(), strict=True))
            rows += [row_of.get(number, -1) for number in best[0].tolist()]
        joined = Ranked.join(fused)
        return Ranked(joined.starts, joined.items, joined.scores, np.asarray(rows, np.int64))


def _add_passages_of_words(
    queries: Sequence[str],
    best: Ranked,
    snapshot: Snapshot,
    documents: Sequence[Document],
    passages: list[tuple[int, int] | None],
) -> None:
    """Find the passages with most words of the query, for hits that only words have found."""
    rows = best.rows
    places = [n for n in range(len(documents)) if rows is None or rows[n] < 0]
    if not places:
        return
    owners = snapshot.owners.rows
    found = np.flatnonzero(np.isin(owners, best.items[places]))
    spans_of: dict[int, list[tuple[int, int]]] = {}
    for owner, (start, stop) in zip(owners[found], snapshot.spans.rows[found], strict=True):
        if stop:
            spans_of.setdefault(int(owner), []).append((int(start), int(stop)))
    query_of = np.repeat(np.arange(len(queries)), best.widths)
    for place in places:
        spans = spans_of.get(int(best.items[place]))
        if spans:
            query, language = queries[query_of[place]], snapshot.words.language
            passages[place] = best_span(query, documents[place].text, spans, language)


def best_span(
    query: str, text: str, spans: Sequence[tuple[int, int]], language: str
) -> tuple[int, int]:
    """Return the passage with most words of a query."""
    words = stems_of(query, language, is_query=True)
    counts = [sum(stem in words for stem in stems_of(text[a:b], language)) for a, b in spans]
    return spans[int(np.argmax(counts))]


def _results(queries: Sequence[str], best: Ranked, snapshot: Snapshot) -> list[list[SearchResult]]:
    documents = snapshot.documents.get(best.items.tolist())
    if not documents:
        return [[] for _ in best.each()]
    places = np.arange(1, len(documents) + 1) - np.repeat(best.starts[:-1], best.widths)
    passages: list[tuple[int, int] | None] = [None] * len(documents)
    if best.rows is not None:
        spans = snapshot.spans.rows[best.rows].tolist()
        passages = [
            (start, stop) if stop and row >= 0 else None
            for (start, stop), row in zip(spans, best.rows.tolist(), strict=True)
        ]
    _add_passages_of_words(queries, best, snapshot, documents, passages)
    ids, texts, metadata, _ = zip(*documents, strict=True)
    copies = map(copied, metadata)
    fields = zip(places.tolist(), best.scores.tolist(), ids, texts, copies, passages, strict=True)
    results = list(itertools.starmap(SearchResult, fields))
    return [results[part] for part in best.each()]
