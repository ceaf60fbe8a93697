"""``/search``, and ``/embed`` as text-embeddings-inference has it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from rag_demo.retriever import SearchResult
from rag_demo.service.answers import Batches, Results, refusals
from rag_demo.service.batching import Job
from rag_demo.service.opened import Asked
from rag_demo.service.problems import AsciiJSON, Problem, status_of_invalid
from rag_demo.service.running import Running
from rag_demo.service.schemas import EmbedRequest, SearchRequest, check_filter
from rag_demo.service.shown import shown_metadata
from rag_demo.vectors import Vectors

__all__ = ["check_texts", "embedded", "router", "running_of"]

_SURROGATE = re.compile("[\ud800-\udfff]")

router = APIRouter(responses=refusals(), default_response_class=AsciiJSON)


def running_of(request: Request) -> Running:
    """Return the service that answers."""
    running: Running = request.state.running
    return running


def check_texts(running: Running, texts: Sequence[str], most: int, what: str) -> None:
    """Refuse more, or longer texts, than are allowed, and what is no text.

    Raises:
        Problem: They are.
    """
    chars = running.settings.limits.query_chars
    if len(texts) > most:
        raise Problem(413, f"{what} has {len(texts)} texts; at most {most} go at once", param=what)
    for row, text in enumerate(texts):
        if len(text) > chars:
            detail = f"text {row} has {len(text):,} characters; at most {chars:,} are read"
            raise Problem(413, detail, param=what)
        if _SURROGATE.search(text):
            raise Problem(422, f"text {row} has half of a surrogate pair", param=what)


async def embedded(
    request: Request, texts: Sequence[str], dimensions: int | None, *, are_queries: bool
) -> Vectors:
    """Embed texts, by and by, so that others get their turn in between.

    Returns:
        Shape (n, d), float32.

    Raises:
        Problem: They are not of so many dimensions.
    """
    running = running_of(request)
    size = running.settings.limits.batch_texts
    vectors: list[Any] = []
    deadline = running.deadline()
    for start in range(0, len(texts), size):
        job = Job("query" if are_queries else "document", texts[start : start + size])
        vectors += await running.ask(request, job, is_more=start > 0, deadline=deadline)
        if dimensions not in (None, len(vectors[0])):
            detail = f"this model's vectors have {len(vectors[0])} dimensions"
            raise Problem(status_of_invalid(request), detail, param="dimensions")
    return np.asarray(vectors, "<f4")


def _shown(results: Sequence[SearchResult]) -> list[dict[str, Any]]:
    return [{**each._asdict(), "metadata": shown_metadata(each.metadata)} for each in results]


@router.post("/search", response_model=None, responses={200: {"model": Results | Batches}})
async def search(request: Request, asked: SearchRequest) -> AsciiJSON:
    """Find the documents nearest to a question, or to each of several."""
    running = running_of(request)
    limits = running.settings.limits
    if (asked.query is None) == (asked.queries is None):
        raise Problem(422, "give one of query and queries")
    queries = asked.queries if asked.query is None else [asked.query]
    assert queries is not None
    check_texts(running, queries, limits.queries, "queries")
    if not all(query.strip() for query in queries):
        raise Problem(422, "a query is empty")
    if asked.top_k > limits.top_k:
        raise Problem(422, f"top_k is at most {limits.top_k}", param="top_k")
    if asked.where is not None:
        try:
            check_filter(asked.where, limits.where_depth, limits.where_values)
        except ValueError as error:
            raise Problem(422, f"where: {error}", param="where") from None
    most = len(queries) * min(asked.top_k, running.opened.documents)
    if most > limits.results:
        detail = f"{most:,} answers are asked for; at most {limits.results:,} are given at once"
        raise Problem(413, detail, param="top_k")
    mode = asked.mode or ("hybrid" if asked.min_score is None else "dense")
    job = Job("search", queries, Asked(asked.top_k, asked.min_score, asked.where, mode))
    found = [_shown(results) for results in await running.ask(request, job)]
    return AsciiJSON({"results": found[0]} if asked.query is not None else {"batches": found})


@router.post("/embed", response_model=None, responses={200: {"model": list[list[float]]}})
async def embed(request: Request, asked: EmbedRequest) -> AsciiJSON:
    """Embed texts, as text-embeddings-inference does; ``prompt_name`` "query" for questions."""
    running = running_of(request)
    texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
    if not texts:
        raise Problem(422, "inputs is empty", param="inputs")
    if not asked.normalize:
        raise Problem(422, "vectors of this service have length 1: leave normalize true")
    check_texts(running, texts, running.settings.limits.texts, "inputs")
    are_queries = asked.prompt_name == "query"
    vectors = await embedded(request, texts, asked.dimensions, are_queries=are_queries)
    return AsciiJSON(vectors.tolist())
