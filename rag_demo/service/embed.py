"""``/embed``, OpenAI's embeddings and models."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_demo.service.jobs import EmbedJob
from rag_demo.service.responses import JSONResponse, Problem, at_most, check_model, respond
from rag_demo.service.schemas import EmbeddingsRequest, EmbedRequest
from rag_demo.service.service import service_of
from rag_demo.vectors import Vectors, normalized

router = APIRouter()


def _kind(prompt: str | None) -> Literal["query", "document"]:
    return "query" if prompt in ("query", "search_query") else "document"


async def _embed(request: Request, job: EmbedJob, dimensions: int | None) -> tuple[Vectors, int]:
    """Embed the texts of a job.

    Returns:
        The vectors, shape (n, d), float32, and the number of tokens.
    """
    service = service_of(request)
    at_most(len(job.texts), service.settings.max_texts, "texts", "input")
    rows = await service.run(request, job)
    vectors = np.asarray([vector for vector, _ in rows], "<f4")
    if dimensions is not None:
        if dimensions > vectors.shape[1]:
            detail = f"dimensions must be at most {vectors.shape[1]}, got {dimensions}"
            raise Problem(422, detail, param="dimensions")
        vectors = normalized(vectors[:, :dimensions], len(vectors))
    return vectors, sum(count for _, count in rows)


@router.post("/", include_in_schema=False)
@router.post("/embed")
async def embed(request: Request, body: EmbedRequest) -> Response:
    """Embed texts as text-embeddings-inference does; ``prompt_name`` "query" embeds queries."""
    job = EmbedJob(
        [body.inputs] if isinstance(body.inputs, str) else body.inputs,
        service_of(request).engine.model.max_tokens,
        body.truncate is not False,
        kind=_kind(body.prompt_name),
    )
    vectors, _ = await _embed(request, job, body.dimensions)
    return respond(request, vectors, truncated=job.truncated)


@router.post("/v1/embeddings")
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """Embed texts as OpenAI does; ``input_type`` "query" embeds them as queries."""
    engine = service_of(request).engine
    check_model(body.model, engine.model_name, engine.model_id)
    job = EmbedJob(
        [body.input] if isinstance(body.input, str) else body.input,
        engine.model.max_tokens,
        body.truncate is not False,
        kind=_kind(body.input_type or body.prompt_name),
    )
    vectors, tokens = await _embed(request, job, body.dimensions)
    rows: list[Any] = list(vectors)
    if body.encoding_format == "base64":
        rows = [base64.b64encode(row.tobytes()).decode("ascii") for row in vectors]
    content = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": n, "embedding": row} for n, row in enumerate(rows)
        ],
        "model": engine.model_name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return respond(request, content, truncated=job.truncated)


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rag-demo"}


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """List the embedding model and the reranker."""
    names = [model.host.name for model in service_of(request).engine.models]
    return JSONResponse({"object": "list", "data": list(map(_card, names))})


@router.get("/v1/models/{model:path}")
async def model(request: Request, model: str) -> JSONResponse:
    """Describe a model."""
    engine = service_of(request).engine
    if model not in engine.hosts:
        check_model(model, engine.model_name, engine.model_id)
        model = engine.model_name
    return JSONResponse(_card(model))
