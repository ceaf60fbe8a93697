"""``/embed``, OpenAI's embeddings and models."""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_demo.service import engine
from rag_demo.service.responses import Problem, at_most, check_model, respond
from rag_demo.service.schemas import EmbeddingsRequest, EmbedRequest
from rag_demo.service.service import Running, Service
from rag_demo.vectors import Vectors, normalized

router = APIRouter()
_Body = EmbedRequest | EmbeddingsRequest


async def _embed(
    request: Request, service: Service, texts: list[str], prompt: str | None, body: _Body
) -> tuple[Vectors, int, int]:
    """Embed texts.

    Returns:
        The vectors, shape (n, d), float32, the number of tokens, and how many texts were cut off.
    """
    at_most(len(texts), service.limits.max_texts, "texts", "input")
    kind = "query" if prompt in ("query", "search_query") else "document"
    rows, tokens, truncated = await service.run_counted(
        request, "model", partial(engine.embed, kind), texts, truncate=body.truncate is not False
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
    name = service.engine.model_name
    check_model(body.model, name, service.engine.model_id)
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


def _names(service: Service) -> list[str]:
    *models, _index = service.engine.hosted.values()
    return [each.host.name for each in models]


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rag-demo"}


@router.get("/v1/models")
async def models(service: Running) -> dict[str, Any]:
    """List the embedding model and the reranker."""
    return {"object": "list", "data": list(map(_card, _names(service)))}


@router.get("/v1/models/{model:any}")
async def model(service: Running, model: str) -> dict[str, Any]:
    """Describe a model."""
    names = _names(service)
    check_model(model, *names, service.engine.model_id)
    return _card(model if model in names else names[0])
