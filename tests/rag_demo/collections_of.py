"""Small collections, and what is right for them: for tests of whatever changes a retriever."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from rag_demo.vectors import normalized

DIMENSION = 8
WORDS = ("alpha", "bravo", "cache", "delta", "echo", "golf")


class Hashed:
    """Every text lies somewhere; texts of one length lie near each other."""

    name = "hashed"
    dimension = DIMENSION

    def embed_query(self, text: str) -> Any:
        return self.embed_documents([text])[0]

    def embed_documents(self, texts: Any) -> Any:
        return np.asarray([vector_of(text) for text in texts])


def vector_of(text: str) -> Any:
    chance = np.random.default_rng(zlib.crc32(text.encode()))
    near = np.random.default_rng(len(text)).standard_normal(DIMENSION)
    return (near + 0.1 * chance.standard_normal(DIMENSION)).astype(np.float32)


def text_of(number: int) -> str:
    return " ".join(WORDS[(number * factor) % 6] for factor in (1, 2, 3, 5)[: 1 + number % 4])


def nearest(documents: dict[str, str], query: str, top_k: int) -> list[tuple[str, float]]:
    """Score everything in float64; ties by id."""
    if not documents:
        return []
    vectors = normalized([vector_of(text) for text in documents.values()]).astype(np.float64)
    scores = (vectors * normalized([vector_of(query)])).sum(axis=1).tolist()
    return sorted(zip(documents, scores, strict=True), key=lambda hit: (-hit[1], hit[0]))[:top_k]
