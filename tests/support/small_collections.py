"""Small collections, and the right answers to questions about them."""

import zlib
from typing import Any

import numpy as np
import pytest

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


def are_nearest(results: Any, documents: dict[str, str], query: str, top_k: int) -> bool:
    """Whether results are those of a float64 computation, ties by id."""
    question = _direction(vector_of(query))
    scores = {name: float(_direction(vector_of(t)) @ question) for name, t in documents.items()}
    best = sorted(scores, key=lambda name: (-scores[name], name))[:top_k]
    return [result.id for result in results] == best and [
        result.score for result in results
    ] == pytest.approx([scores[name] for name in best], abs=1e-6)


def _direction(vector: Any) -> Any:
    wide = vector.astype(np.float64)
    return wide / np.linalg.norm(wide)
