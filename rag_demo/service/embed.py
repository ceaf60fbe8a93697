"""``/embed``, OpenAI's embeddings and models."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_demo.service.checks import at_most, check_dimensions, check_model
from rag_demo.service.jobs import EmbedJob
from rag_demo.service.problems import Problem
from rag_demo.service.responses import JSONResponse, respond
from rag_demo.service.schemas import EmbeddingsRequest, EmbedRequest
from rag_demo.service.service import service_of
from rag_demo.vectors import Vectors, normalized

router = APIRouter()
_QUERIES = ("query", "search_query")


async def _embed(request: Request, job: EmbedJob, dimensions: int | None) -> tuple[Vectors, int]:
    """Embed the texts of a job.

    Returns:
        The vectors, shape (n, d), float32, and the number of tokens.
    """
    service = service_of(request)
    at_most(len(job.texts), service.settings.max_texts, "texts", "input")
    check_dimensions(dimensions, service.engine.model.dimension)
    rows = await service.run(request, job)
    vectors = np.asarray([vector for vector, _ in rows], "<f4")
    if check_dimensions(dimensions, vectors.shape[1]) is not None:
        vectors = normalized(vectors[:, :dimensions], len(vectors))
    return vectors, sum(count for _, count in rows)


@router.post("/", include_in_schema=False)
@router.post("/embed")
async def embed(request: Request, body: EmbedRequest) -> Response:
    """Embed texts as text-embeddings-inference does; ``prompt_name`` "query" embeds queries."""
    job = EmbedJob(
        [body.inputs] if isinstance(body.inputs, str) else body.inputs,
        service_of(request).engine.model.max_tokens,
        kind="query" if body.prompt_name in _QUERIES else "document",
        truncate=body.truncate is not False,
    )
    vectors, _ = await _embed(request, job, body.dimensions)
    return respond(request, vectors, truncated=job.truncated)


@router.post("/v1/embeddings")
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """Embed texts as OpenAI does; ``input_type`` "query" embeds them as queries."""
    engine = service_of(request).engine
    check_model(body.model, engine.model_name, engine.model_id)
    texts: Any = [body.input] if isinstance(body.input, str) else body.input
    if not texts:
        raise Problem(400, "input must not be empty", param="input")
    if not isinstance(texts[0], str):
        raise Problem(
            400,
            "input must be text, not token ids (with LangChain: "
            "OpenAIEmbeddings(check_embedding_ctx_length=False))",
            param="input",
            code="token_arrays_unsupported",
        )
    job = EmbedJob(
        texts,
        engine.model.max_tokens,
        kind="query" if (body.input_type or body.prompt_name) in _QUERIES else "document",
        truncate=body.truncate is not False,
        counts_all=True,
    )
    vectors, tokens = await _embed(request, job, body.dimensions)
    rows: list[Any] = list(vectors)
    if body.encoding_format == "base64":
        rows = [base64.b64encode(row.tobytes()).decode("ascii") for row in vectors]
    content = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": row}
            for index, row in enumerate(rows)
        ],
        "model": engine.model_name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return respond(request, content, truncated=job.truncated)


def _cards(request: Request) -> dict[str, dict[str, Any]]:
    """Describe the models, by their names."""
    names = [model.host.name for model in service_of(request).engine.models]
    return {
        name: {"id": name, "object": "model", "created": 0, "owned_by": "rag-demo"}
        for name in names
    }


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """List the embedding model and the reranker."""
    return JSONResponse({"object": "list", "data": list(_cards(request).values())})


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> JSONResponse:
    """Describe a model."""
    engine, cards = service_of(request).engine, _cards(request)
    if model not in cards:
        check_model(model, engine.model_name, engine.model_id)
    return JSONResponse(cards.get(model, cards[engine.model_name]))
