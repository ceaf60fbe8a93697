"""Reranking, as text-embeddings-inference, Cohere and Jina do it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request

from rag_demo.service.batcher import Job
from rag_demo.service.openai_routes import check_model
from rag_demo.service.problems import Problem
from rag_demo.service.responses import JSONAnswer
from rag_demo.service.schemas import (
    OpenAIRerankRequest,
    RankedText,
    RerankAnswer,
    RerankRequest,
    responses,
)
from rag_demo.service.search_routes import check_texts
from rag_demo.service.service import service_of

__all__ = ["router"]

router = APIRouter()


async def _ranks(request: Request, query: str, texts: Sequence[str]) -> list[tuple[float, int]]:
    """Return scores and places of the texts, best first; equal scores by place.

    Raises:
        Problem: There is no reranker, or the request is too large.
    """
    service = service_of(request)
    if service.engine.reranker is None:
        raise Problem(404, "no reranker is configured; start the service with --reranker NAME")
    check_texts(request, [query], 1, "query")
    check_texts(request, texts, service.settings.limits.texts, "texts")
    size, deadline = service.settings.limits.batch_texts, service.deadline()
    scores: list[float] = []
    for start in range(0, len(texts), size):  # Other requests get their turn in between.
        job = Job("rerank", texts[start : start + size], query=query)
        scores += await service.batcher.run(request, job, deadline, is_continuation=start > 0)
    return sorted(((score, row) for row, score in enumerate(scores)), key=lambda p: (-p[0], p[1]))


@router.post("/rerank", response_model=None, responses=responses(list[RankedText], 404, 413, 422))
async def rerank(request: Request, body: RerankRequest) -> JSONAnswer:
    """Score texts as answers to a query, as text-embeddings-inference does."""
    ranks = await _ranks(request, body.query, body.texts)
    return JSONAnswer(
        [
            {
                "index": row,
                "score": score,
                **({"text": body.texts[row]} if body.return_text else {}),
            }
            for score, row in ranks
        ]
    )


@router.post("/v1/rerank", response_model=None, responses=responses(RerankAnswer, 404, 413))
@router.post("/v2/rerank", response_model=None, responses=responses(RerankAnswer, 404, 413))
async def rerank_documents(request: Request, body: OpenAIRerankRequest) -> JSONAnswer:
    """Score documents as answers to a query, as Cohere and Jina do."""
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    model_id = service_of(request).settings.reranker
    name = "" if model_id is None else Path(model_id).name  # Without this machine's folders.
    if model_id is not None:
        check_model(body.model, name, model_id)
    ranks = await _ranks(request, body.query, texts)
    results: list[dict[str, Any]] = []
    for score, row in ranks[: body.top_n]:
        document = {"document": {"text": texts[row]}} if body.return_documents else {}
        results.append({"index": row, "relevance_score": score, **document})
    request_id = request.scope.get("request_id", "")
    return JSONAnswer({"id": request_id, "model": name, "results": results, "meta": {}})
