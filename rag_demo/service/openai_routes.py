"""OpenAI's embeddings, models and searches of a vector store."""

from __future__ import annotations

import base64
import json
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import JSONResponse, Response

from rag_demo.retriever import SearchResult
from rag_demo.service.batcher import Job
from rag_demo.service.engine import SearchOptions
from rag_demo.service.filters import check_limits, convert_filter, public_metadata
from rag_demo.service.problems import Problem
from rag_demo.service.responses import json_response
from rag_demo.service.schemas import EmbeddingsRequest, StoreSearchRequest
from rag_demo.service.search_routes import check_model, check_texts, embed_texts
from rag_demo.service.service import service_of

_STORE = "index"
_MAX_ATTRIBUTE_CHARS = 512  # OpenAI's limit
_BEST_FUSED = 2 / 61  # the score of a document that is first by words and by meaning
Store = Annotated[str, Path(json_schema_extra={"enum": [_STORE]})]

router = APIRouter(prefix="/v1")


@router.post("/embeddings")
async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
    """Embed texts; ``input_type`` "query" embeds them as queries."""
    service = service_of(request)
    limits, engine = service.settings.limits, service.engine
    check_model(body.model, engine.model_name, engine.model_id)
    texts: Any = [body.input] if isinstance(body.input, str) else body.input
    if not all(isinstance(text, str) for text in texts):
        raise Problem(
            400,
            "input must be text, not token ids (with LangChain: "
            "OpenAIEmbeddings(check_embedding_ctx_length=False))",
            param="input",
            code="token_arrays_unsupported",
        )
    check_texts(request, texts, limits.texts, "input")
    if not all(texts):
        raise Problem(400, "input must not contain an empty text", param="input")
    vectors, tokens = await embed_texts(
        request,
        texts,
        are_queries=(body.input_type or body.prompt_name) in ("query", "search_query"),
        dimensions=body.dimensions,
        tokens=True,
    )
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
    return await json_response(content, limits.answer_bytes)


@router.get("/models")
async def models(request: Request) -> JSONResponse:
    """List the embedding model."""
    card = _model_card(service_of(request).engine.model_name)
    return JSONResponse({"object": "list", "data": [card]})


@router.get("/models/{model:path}")
async def model(request: Request, model: str) -> JSONResponse:
    """Describe the embedding model."""
    engine = service_of(request).engine
    check_model(model, engine.model_name, engine.model_id)
    return JSONResponse(_model_card(engine.model_name))


def _model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rag-demo"}


@router.post("/vector_stores/{store}/search")
async def search(request: Request, store: Store, body: StoreSearchRequest) -> Response:
    """Search the index. Scores are shares of the best one; with a threshold they are cosines."""
    service = service_of(request)
    if store != _STORE:
        detail = f"the vector store does not exist; available: {_STORE!r}"
        raise Problem(404, detail, code="not_found")
    queries = [body.query] if isinstance(body.query, str) else body.query
    limits = service.settings.limits
    check_texts(request, queries, limits.queries, "query")
    if not all(query.strip() for query in queries):
        raise Problem(400, "query must not be empty", param="query")
    where = None if body.filters is None else convert_filter(body.filters)
    check_limits(where, limits, "/v1/", "filters")
    threshold = body.ranking_options.score_threshold if body.ranking_options else None
    mode = "dense" if threshold else "hybrid"
    options = SearchOptions(body.max_num_results, threshold or None, where, mode)
    found: list[list[SearchResult]] = await service.run(request, [Job("search", queries, options)])
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
    return await json_response(content, limits.answer_bytes)


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
