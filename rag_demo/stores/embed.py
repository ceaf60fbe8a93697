"""Embedding: the step between reading and writing documents, in any process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rag_demo.documents.document import Document
from rag_demo.documents.passages import passages_of, with_title
from rag_demo.encoding.embedder import BasicEmbedder, as_embedder
from rag_demo.stores.store import EmbeddedBatch
from rag_demo.vectors import normalized


def embed(
    documents: Sequence[Document],
    embedding_model: BasicEmbedder,
    *,
    passages: bool = True,
    chunk_size: int | None = None,
    chunk_overlap: int = 0,
    on_progress: Callable[[int], object] | None = None,
) -> EmbeddedBatch:
    """Embed documents: the step between reading and writing, in any process.

    Args:
        documents: Documents with different ids.
        embedding_model: The embedding model.
        passages, chunk_size, chunk_overlap, on_progress: See `Retriever.add`.
    """
    embedder = as_embedder(embedding_model)
    texts = [each.text for each in documents]
    titles = [each.metadata.get("title") for each in documents]
    parts: list[list[tuple[int, int]]] = [[] for _ in documents]
    if passages:
        parts = passages_of(texts, titles, embedder.lengths, chunk_size, chunk_overlap)
    places = [place for place, cuts in enumerate(parts) for _ in range(1 + len(cuts))]
    bounds = [span for cuts in parts for span in [(0, 0), *cuts]]
    texts = [
        with_title(texts[place][start : stop or None], titles[place])
        for place, (start, stop) in zip(places, bounds, strict=True)
    ]
    owners, spans = np.asarray(places, np.int64), np.asarray(bounds, np.int32).reshape(-1, 2)
    progress = None
    if on_progress is not None:
        progress = _of_documents(on_progress, len(documents), len(texts))
    vectors = normalized(embedder.embed_documents(texts, on_progress=progress), len(texts))
    return EmbeddedBatch(documents, owners, spans, vectors, embedder.known_identity)


def _of_documents(
    on_progress: Callable[[int], object], documents: int, texts: int
) -> Callable[[int], None]:
    """Turn progress in embedded texts into progress in documents."""
    done = reported = 0

    def progress(count: int) -> None:
        nonlocal done, reported
        done += count
        on_progress(documents * done // texts - reported)
        reported = documents * done // texts

    return progress
