"""``/search``, embeddings, reranking, and the names of the models."""

from __future__ import annotations

import base64
import math
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_demo.search_request import RERANKED, SearchResult
from rag_demo.service import models
from rag_demo.service.lane import Job
from rag_demo.service.responses import Problem, at_most, check_model, respond
from rag_demo.service.schemas import (
    EmbeddingsRequest,
    EmbedRequest,
    JSONRoute,
    RerankRequest,
    SearchRequest,
)
from rag_demo.service.service import Running, Service
from rag_demo.vectors import Vectors, normalized

router = APIRouter(route_class=JSONRoute)


@router.post("/search")
async def search(request: Request, service: Running, body: SearchRequest) -> Response:
    """Find the documents nearest to a query, or to each of several queries."""
    limits = service.limits
    queries = [body.query] if body.query is not None else body.queries or []
    at_most(len(queries), limits.max_queries, "queries", "queries")
    at_most(body.top_k, limits.max_top_k, "results of a query", "top_k")
    results = len(queries) * min(body.top_k, max(service.index.documents, 1))
    at_most(results, limits.max_results, "results", "top_k")
    tokens = models.estimate(queries)
    at_most(max(tokens), limits.max_query_tokens, "tokens in a query", "queries")
    mode: str = body.mode or ("hybrid" if body.min_score is None else "dense")
    most = limits.max_texts if body.rerank else 0
    wanted = max(body.top_k, min(RERANKED * body.top_k, most))
    deadline, truncated = service.deadline(), 0
    vectors: list[Any] = [None] * len(queries)
    if mode != "bm25":
        vectors, _, truncated = await service.run_counted(
            request, "model", partial(models.embed, "query"), queries, deadline
        )
    options: Any = {"top_k": wanted, "min_score": body.min_score, "where": body.where, "mode": mode}
    options["neighbors"] = body.neighbors
    inputs = list(zip(queries, vectors, strict=True))
    job = Job(partial(service.index.search, options), inputs, tokens)
    found: list[list[SearchResult]] = await service.lanes["index"].run(request, job, deadline)
    if body.rerank:
        for row, (query, its) in enumerate(zip(queries, found, strict=True)):
            texts = [each.passage_text for each in its]
            order, _, cut = await _ranked(request, service, query, texts, False, deadline=deadline)
            found[row] = [
                its[place]._replace(rank=rank, score=score)
                for rank, (place, score) in enumerate(order[: body.top_k], start=1)
            ]
            truncated += cut
    batches = [[each._asdict() for each in results] for results in found]
    if body.include_text:
        size = sum(len(each["text"]) for each in chain.from_iterable(batches))
        at_most(size, limits.max_response_bytes, "characters in the results", "top_k")
    else:
        for each in chain.from_iterable(batches):
            del each["text"]
    content = {"batches": batches} if body.query is None else {"results": batches[0]}
    return respond(request, content, truncated=truncated)


async def _ranked(
    request: Request, service: Service, query: str, texts: list[str], raw: bool, **options: Any
) -> tuple[list[tuple[int, float]], int, int]:
    """Score texts as answers to a query.

    Returns:
        The places of the texts and their scores, from 0 to 1 or raw logits, the best first; the
        number of tokens; how many texts were cut off.

    Raises:
        Problem: There is no reranker, or there are too many texts.
    """
    if "reranker" not in service.lanes:
        raise Problem(404, "no reranker is configured; start the service with --reranker NAME")
    if not texts:
        return [], 0, 0
    at_most(len(texts), service.limits.max_texts, "texts", "texts")
    (more,) = models.estimate([query])
    at_most(more, service.limits.max_query_tokens, "tokens in a query", "query")
    logits, tokens, truncated = await service.run_counted(
        request, "reranker", partial(models.rerank, query), texts, more=more, **options
    )
    # tanh is exact where exp would overflow.
    scores = logits if raw else [(1 + math.tanh(logit / 2)) / 2 for logit in logits]
    order = sorted(enumerate(scores), key=lambda pair: -pair[1])
    return order, tokens, truncated


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(request: Request, service: Running, body: RerankRequest) -> Response:
    """Score ``texts`` as text-embeddings-inference does, or ``documents`` as Jina and Cohere do."""
    model_id = service.settings.reranker or ""
    name = Path(model_id).name  # Without folders of the server.
    if model_id and body.documents:
        check_model(body.model, name, model_id)
    given = body.texts or body.documents or []
    texts = [each if isinstance(each, str) else each.text for each in given]
    truncate = body.truncate is not False
    order, tokens, truncated = await _ranked(
        request, service, body.query, texts, body.raw_scores, truncate=truncate
    )
    content: Any
    if body.texts:
        content = [{"index": row, "score": score} for row, score in order]
        if body.return_text:
            content = [{**each, "text": texts[each["index"]]} for each in content]
        return respond(request, content, truncated=truncated)
    results: list[Any] = [{"index": row, "relevance_score": score} for row, score in order]
    is_cohere = request.scope["path"].startswith("/v2/")
    if body.return_documents or (body.return_documents is None and not is_cohere):
        results = [{**each, "document": {"text": texts[each["index"]]}} for each in results]
    content = {
        "id": request.scope["request_id"],
        "model": name,
        "results": results[: body.top_n],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens}},
    }
    return respond(request, content, truncated=truncated)


async def _embed(
    request: Request,
    service: Service,
    texts: list[str],
    prompt: str | None,
    body: EmbedRequest | EmbeddingsRequest,
) -> tuple[Vectors, int, int]:
    """Embed texts.

    Returns:
        The vectors, shape (n, d), float32, the number of tokens, and how many texts were cut off.
    """
    at_most(len(texts), service.limits.max_texts, "texts", "input")
    kind = "query" if prompt in ("query", "search_query") else "document"
    rows, tokens, truncated = await service.run_counted(
        request, "model", partial(models.embed, kind), texts, truncate=body.truncate is not False
    )
    vectors, wanted = np.asarray(rows, "<f4"), body.dimensions
    if wanted is not None:
        if wanted > vectors.shape[1]:
            detail = f"dimensions must be at most {vectors.shape[1]}, got {wanted}"
            raise Problem(422, detail, param="dimensions")
        vectors = normalized(vectors[:, :wanted], len(vectors))
    return vectors, tokens, truncated


@router.post("/", include_in_schema=False)
@router.post("/embed")
async def embed(request: Request, service: Running, body: EmbedRequest) -> Response:
    """Embed texts as text-embeddings-inference does; ``prompt_name`` "query" embeds queries."""
    vectors, _, cut = await _embed(request, service, body.inputs, body.prompt_name, body)
    return respond(request, vectors, truncated=cut)


@router.post("/v1/embeddings")
async def embeddings(request: Request, service: Running, body: EmbeddingsRequest) -> Response:
    """Embed texts as OpenAI does; ``input_type`` "query" embeds them as queries."""
    name = service.model_name
    check_model(body.model, name, service.model_id)
    prompt = body.input_type or body.prompt_name
    vectors, tokens, cut = await _embed(request, service, body.input, prompt, body)
    rows: list[Any] = list(vectors)
    if body.encoding_format == "base64":
        rows = [base64.b64encode(row.tobytes()).decode("ascii") for row in vectors]
    content = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": n, "embedding": row} for n, row in enumerate(rows)
        ],
        "model": name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return respond(request, content, truncated=cut)


@router.get("/v1/models")
async def list_models(service: Running) -> dict[str, Any]:
    """List the embedding model and the reranker."""
    *lanes, _index = service.lanes.values()
    return {"object": "list", "data": [_card(lane.host.name) for lane in lanes]}


@router.get("/v1/models/{name:any}")
async def get_model(service: Running, name: str) -> dict[str, Any]:
    """Describe the embedding model or the reranker."""
    *lanes, _index = service.lanes.values()
    check_model(name, *(lane.host.name for lane in lanes))
    return _card(name)


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rag-demo"}
