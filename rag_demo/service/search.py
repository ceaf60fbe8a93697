"""``/search`` and reranking."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_demo.retriever import SearchResult
from rag_demo.service.engine import SearchOptions
from rag_demo.service.jobs import RerankJob, SearchJob
from rag_demo.service.responses import Problem, at_most, check_model, respond
from rag_demo.service.schemas import DocumentsRerankRequest, RerankRequest, SearchRequest
from rag_demo.service.service import service_of

router = APIRouter()
_RERANKED = 5  # times as many results are reranked as are wanted


@router.post("/search")
async def search(request: Request, body: SearchRequest) -> Response:
    """Find the documents nearest to a query, or to each of several queries."""
    service = service_of(request)
    settings = service.settings
    queries = [body.query] if body.query is not None else body.queries or []
    at_most(len(queries), settings.max_queries, "queries", "queries")
    at_most(body.top_k, settings.max_top_k, "results of a query", "top_k")
    results = len(queries) * min(body.top_k, max(service.engine.documents, 1))
    at_most(results, settings.max_results, "results", "top_k")
    mode: str = body.mode or ("hybrid" if body.min_score is None else "dense")
    wanted = body.top_k * (_RERANKED if body.rerank else 1)
    where: Any = body.where
    job = SearchJob(queries, options=SearchOptions(wanted, body.min_score, where, mode))
    at_most(max(job.tokens), settings.max_query_tokens, "tokens in a query", "queries")
    deadline, truncated = service.deadline(), 0
    found: list[list[SearchResult]] = await service.run(request, job, deadline)
    if body.rerank:
        for row, (query, its) in enumerate(zip(queries, found, strict=True)):
            texts = [each.text[slice(*(each.passage or (None,)))] for each in its]
            scores, _, cut = await _scores(request, query, texts, deadline=deadline)
            its = [each._replace(score=score) for each, score in zip(its, scores, strict=True)]
            its = sorted(its, key=lambda each: (-each.score, each.id))[: body.top_k]
            found[row] = [each._replace(rank=rank) for rank, each in enumerate(its, start=1)]
            truncated += cut
    batches = [[each._asdict() for each in results] for results in found]
    if not body.include_text:
        for each in chain.from_iterable(batches):
            del each["text"]
    content = {"batches": batches} if body.query is None else {"results": batches[0]}
    return respond(request, content, truncated=truncated)


async def _scores(
    request: Request,
    query: str,
    texts: Sequence[str],
    *,
    raw: bool = False,
    truncate: bool = True,
    deadline: float | None = None,
) -> tuple[list[float], int, int]:
    """Score texts as answers to a query.

    Returns:
        The scores, from 0 to 1 or raw logits; the number of tokens; how many texts were cut off.

    Raises:
        Problem: There is no reranker, or there are too many texts.
    """
    service = service_of(request)
    reranker = service.engine.reranker
    if reranker is None:
        raise Problem(404, "no reranker is configured; start the service with --reranker NAME")
    if not texts:
        return [], 0, 0
    at_most(len(texts), service.settings.max_texts, "texts", "texts")
    job = RerankJob(texts, reranker.max_tokens, truncate, query=query)
    rows = await service.run(request, job, deadline)
    # tanh is exact where exp would overflow.
    scores = [score if raw else (1 + math.tanh(score / 2)) / 2 for score, _ in rows]
    return scores, sum(count for _, count in rows), job.truncated


def _order(scores: Sequence[float]) -> list[int]:
    """Return the places of the scores, the best first; equal scores by place."""
    return sorted(range(len(scores)), key=lambda row: -scores[row])


@router.post("/rerank")
async def rerank(request: Request, body: RerankRequest | DocumentsRerankRequest) -> Response:
    """Score ``texts`` as text-embeddings-inference does, or ``documents`` as Jina does."""
    if isinstance(body, DocumentsRerankRequest):
        return await rerank_documents(request, body)
    scores, _, truncated = await _scores(
        request,
        body.query,
        body.texts,
        raw=body.raw_scores,
        truncate=body.truncate is not False,
    )
    content: list[dict[str, Any]] = [{"index": row, "score": scores[row]} for row in _order(scores)]
    if body.return_text:
        content = [{**each, "text": body.texts[each["index"]]} for each in content]
    return respond(request, content, truncated=truncated)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank_documents(request: Request, body: DocumentsRerankRequest) -> Response:
    """Score documents as answers to a query, as Jina and Cohere do."""
    model_id = service_of(request).settings.reranker or ""
    name = Path(model_id).name  # Without folders of the server.
    if model_id:
        check_model(body.model, name, model_id)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    scores, tokens, truncated = await _scores(request, body.query, texts, raw=body.raw_scores)
    with_documents = body.return_documents
    if with_documents is None:
        with_documents = not request.scope["path"].startswith("/v2/")
    results: list[dict[str, Any]] = []
    for row in _order(scores)[: body.top_n]:
        document = {"document": {"text": texts[row]}} if with_documents else {}
        results.append({"index": row, "relevance_score": scores[row], **document})
    content = {
        "id": request.scope["request_id"],
        "model": name,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "meta": {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": tokens}},
    }
    return respond(request, content, truncated=truncated)
