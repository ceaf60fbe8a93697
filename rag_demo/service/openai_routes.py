"""OpenAI's embeddings, models and searches of a vector store."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from rag_demo.retriever import SearchResult
from rag_demo.service.batcher import Job
from rag_demo.service.engine import Engine, SearchOptions
from rag_demo.service.filters import check_limits, where_of
from rag_demo.service.metadata import public_metadata
from rag_demo.service.problems import Problem
from rag_demo.service.responses import JSONAnswer
from rag_demo.service.schemas import (
    EmbeddingsAnswer,
    EmbeddingsRequest,
    ModelCard,
    ModelList,
    StorePage,
    StoreSearchRequest,
    responses,
)
from rag_demo.service.search_routes import check_texts, embed_texts, send
from rag_demo.service.service import service_of

__all__ = ["check_model", "router"]

_STORE = "index"
_MAX_ATTRIBUTE_CHARS = 512  # OpenAI's limit
_BEST_FUSED = 2 / 61  # of a document that is first by words and by meaning
_VECTOR_BYTES = 5_000
Store = Annotated[str, Path(json_schema_extra={"enum": [_STORE]})]

router = APIRouter(prefix="/v1")


def check_model(model: str, name: str, model_id: str) -> None:
    """Refuse a model that is not served.

    Raises:
        Problem: The client names another one.
    """
    if model not in (name, model_id, FilePath(model_id).name, "default"):
        detail = f"the model {model[:200]!r} does not exist; available: {name!r}, 'default'"
        raise Problem(404, detail, param="model", code="model_not_found")


def _check_embedding_model(model: str, engine: Engine) -> None:
    check_model(model, engine.model_name, engine.model_id)


@router.post(
    "/embeddings", response_model=None, responses=responses(EmbeddingsAnswer, 400, 404, 413)
)
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """Embed texts; ``input_type`` "query" embeds them as questions."""
    service = service_of(request)
    _check_embedding_model(body.model, service.engine)
    texts: Any = [body.input] if isinstance(body.input, str) else body.input
    if not all(isinstance(text, str) for text in texts):
        raise Problem(
            400,
            "input must be texts, not tokens of another model's tokenizer (with LangChain: "
            "OpenAIEmbeddings(check_embedding_ctx_length=False))",
            param="input",
            code="token_arrays_unsupported",
        )
    check_texts(request, texts, service.settings.limits.texts, "input")
    if not all(texts):
        raise Problem(400, "input has an empty text", param="input")
    vectors, tokens = await embed_texts(
        request,
        texts,
        are_queries=(body.input_type or body.prompt_name) in ("query", "search_query"),
        dimensions=body.dimensions,
        tokens=True,
    )
    rows: Sequence[Any] = list(vectors)
    if body.encoding_format == "base64":
        rows = [base64.b64encode(row.tobytes()).decode("ascii") for row in vectors]
    content = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": row}
            for index, row in enumerate(rows)
        ],
        "model": service.engine.model_name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return await send(request, content, len(rows) * _VECTOR_BYTES)


@router.get("/models", response_model=None, responses=responses(ModelList))
async def models(request: Request) -> JSONAnswer:
    """List the embedding model."""
    name = service_of(request).engine.model_name
    return JSONAnswer({"object": "list", "data": [_card(name)]})


@router.get("/models/{model:path}", response_model=None, responses=responses(ModelCard, 404))
async def model(request: Request, model: str) -> JSONAnswer:
    """Describe the embedding model."""
    engine = service_of(request).engine
    _check_embedding_model(model, engine)
    return JSONAnswer(_card(engine.model_name))


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rag-demo"}


@router.post(
    "/vector_stores/{store}/search",
    response_model=None,
    responses=responses(StorePage, 400, 404, 413),
)
async def search(request: Request, store: Store, body: StoreSearchRequest) -> Response:
    """Search the index, the only store. Scores are at most 1; cosines if there is a threshold."""
    service = service_of(request)
    if store != _STORE:
        detail = f"the vector store does not exist; available: {_STORE!r}"
        raise Problem(404, detail, code="not_found")
    queries = [body.query] if isinstance(body.query, str) else body.query
    limits = service.settings.limits
    check_texts(request, queries, limits.queries, "query")
    if not all(query.strip() for query in queries):
        raise Problem(400, "query is empty", param="query")
    where = None if body.filters is None else where_of(body.filters)
    check_limits(where, limits, "/v1/", "filters")
    threshold = body.ranking_options.score_threshold if body.ranking_options else None
    mode = "dense" if threshold else "hybrid"
    options = SearchOptions(body.max_num_results, threshold or None, where, mode)
    found: list[list[SearchResult]] = await service.run(request, Job("search", queries, options))
    # Several queries are one search: each document counts with its best result.
    best: dict[str, SearchResult] = {}
    for result in sorted((each for results in found for each in results), key=lambda r: -r.score):
        best.setdefault(result.id, result)
    results = list(best.values())[: body.max_num_results]
    scale = 1.0 if mode == "dense" else _BEST_FUSED
    content = {
        "object": "vector_store.search_results.page",
        "search_query": queries,
        "data": [_store_result(each, scale) for each in results],
        "has_more": False,
        "next_page": None,
    }
    return await send(request, content, sum(len(each.text) + 512 for each in results))


def _store_result(result: SearchResult, scale: float) -> dict[str, Any]:
    start, stop = result.passage or (0, len(result.text))
    metadata = public_metadata(result.metadata)
    return {
        "file_id": result.id,
        "filename": str(metadata.get("path", metadata.get("source", result.id))),
        "score": min(1.0, result.score / scale),
        "attributes": {key: _attribute(value) for key, value in metadata.items()},
        "content": [{"type": "text", "text": result.text[start:stop]}],
    }


def _attribute(value: Any) -> str | float | bool:
    if isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:_MAX_ATTRIBUTE_CHARS]
