"""The work of requests, and the functions that compute it with a model or the index."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rag_demo.encoding.embedder import as_embedder
from rag_demo.service.logs import REQUEST_ID

_BYTES_PER_TOKEN = 3
_SPECIAL_TOKENS = 2


class SearchOptions(NamedTuple):
    """Options of a search; queries with equal options are searched together."""

    top_k: int
    min_score: float | None
    where: Mapping[str, Any] | None
    mode: str


class Job:
    """The inputs of a request. Some of them are computed at a time, in their order.

    Args:
        compute: Computes inputs with the model of a lane, and returns a result for each. Inputs of
            jobs whose functions have the same repr are computed together.
        inputs: The inputs.
        tokens: The estimated tokens of each input.

    Attributes:
        answer: The result of each input. The lane sets it.
        results: The results so far.
        taken: How many inputs have been taken from the queue.
        request_id: For the log.
        queued_at: Time of creation, by ``time.perf_counter``.
    """

    def __init__(
        self, compute: Callable[..., Iterable[Any]], inputs: Sequence[Any], tokens: Sequence[int]
    ) -> None:
        self.compute, self.inputs, self.tokens = compute, inputs, tokens
        self.key = repr(compute)
        self.answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.results: list[Any] = []
        self.taken, self.request_id, self.queued_at = 0, REQUEST_ID.get(), time.perf_counter()


Item = tuple[Job, Any]
"""A job and one of its inputs."""


def estimate(texts: Sequence[str], most: int | None = None) -> list[int]:
    """Return about how many tokens texts have: one for three bytes, and at most ``most``."""
    sizes = (len(text.encode("utf-8", "replace")) for text in texts)
    counts = (_SPECIAL_TOKENS + size // _BYTES_PER_TOKEN for size in sizes)
    return list(counts) if most is None else [min(count, most) for count in counts]


def embed(kind: str, model: Any, texts: Sequence[str]) -> list[tuple[Any, int]]:
    """Return the vector and the number of tokens of each text; 0 if the model cannot count."""
    embed_texts = as_embedder(model).embed_queries if kind == "query" else model.embed_documents
    vectors = np.asarray(embed_texts(list(texts)), np.float32)
    count = getattr(model, "count_tokens", None)
    counts = count(list(texts), kind) if count else [0] * len(texts)
    return list(zip(vectors, counts, strict=True))


def search(options: SearchOptions, index: Any, inputs: Sequence[tuple[str, Any]]) -> list[Any]:
    """Return the results of queries with vectors; the mode bm25 needs no vectors."""
    queries, vectors = zip(*inputs, strict=True)
    known = None if options.mode == "bm25" else np.stack(vectors)
    found: list[Any] = index.search_batch(queries, *options, vectors=known)
    return found


def rerank(query: str, reranker: Any, texts: Sequence[str]) -> list[tuple[float, int]]:
    """Return the logit and the number of tokens of each text with the query."""
    return list(zip(*reranker.score_and_count(query, texts), strict=True))
