"""``/search`` and reranking."""

from __future__ import annotations

import math
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_demo.retriever import SearchResult
from rag_demo.service import engine
from rag_demo.service.lane import Job
from rag_demo.service.responses import Problem, at_most, check_model, respond
from rag_demo.service.schemas import RerankRequest, SearchRequest
from rag_demo.service.service import Running, Service

router = APIRouter()
_RERANKED = 5  # times as many results are reranked as are wanted


@router.post("/search")
async def search(request: Request, service: Running, body: SearchRequest) -> Response:
    """Find the documents nearest to a query, or to each of several queries."""
    limits = service.limits
    queries = [body.query] if body.query is not None else body.queries or []
    at_most(len(queries), limits.max_queries, "queries", "queries")
    at_most(body.top_k, limits.max_top_k, "results of a query", "top_k")
    results = len(queries) * min(body.top_k, max(service.engine.documents, 1))
    at_most(results, limits.max_results, "results", "top_k")
    tokens = engine.estimate(queries)
    at_most(max(tokens), limits.max_query_tokens, "tokens in a query", "queries")
    mode: str = body.mode or ("hybrid" if body.min_score is None else "dense")
    most = limits.max_texts if body.rerank else 0
    wanted = max(body.top_k, min(_RERANKED * body.top_k, most))
    deadline, truncated = service.deadline(), 0
    vectors: list[Any] = [None] * len(queries)
    if mode != "bm25":
        vectors, _, truncated = await service.run_counted(
            request, "model", partial(engine.embed, "query"), queries, deadline
        )
    options: Any = {"top_k": wanted, "min_score": body.min_score, "where": body.where, "mode": mode}
    inputs = list(zip(queries, vectors, strict=True))
    job = Job(partial(service.engine.search, options), inputs, tokens)
    found: list[list[SearchResult]] = await service.lanes["index"].run(request, job, deadline)
    if body.rerank:
        for row, (query, its) in enumerate(zip(queries, found, strict=True)):
            texts = [each.text[slice(*(each.passage or (None,)))] for each in its]
            order, _, cut = await _ranked(request, service, query, texts, False, deadline=deadline)
            found[row] = [
                its[place]._replace(rank=rank, score=score)
                for rank, (place, score) in enumerate(order[: body.top_k], start=1)
            ]
            truncated += cut
    batches = [[each._asdict() for each in results] for results in found]
    if not body.include_text:
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
    logits, tokens, truncated = await service.run_counted(
        request, "reranker", partial(engine.rerank, query), texts, **options
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
    texts = body.texts or [each.text for each in body.documents or ()]
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
