"""``/search``, ``/embed``, reranking, and changes of the index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from rag_demo.errors import short_repr
from rag_demo.retriever import SearchResult
from rag_demo.service.batcher import Job
from rag_demo.service.engine import SearchOptions
from rag_demo.service.filters import check_limits, public_metadata
from rag_demo.service.problems import Problem, invalid_status
from rag_demo.service.responses import json_response
from rag_demo.service.schemas import (
    DocumentsRequest,
    EmbedRequest,
    OpenAIRerankRequest,
    RerankRequest,
    SearchRequest,
)
from rag_demo.service.service import Service, service_of
from rag_demo.vectors import Vectors

_SURROGATE = "a lone surrogate, which UTF-8 cannot encode; remove it"

router = APIRouter()


def check_texts(request: Request, texts: Sequence[str], most: int, param: str) -> None:
    """Check the number, the lengths and the encoding of texts.

    Raises:
        Problem: The list is empty or too long, or a text is too long or has a lone surrogate.
    """
    chars = service_of(request).settings.limits.query_chars
    status = invalid_status(request.url.path)
    if not texts:
        raise Problem(status, f"{param} must not be empty", param=param)
    if len(texts) > most:
        detail = f"{param} has {len(texts):,} texts; at most {most:,} are allowed"
        raise Problem(413, detail, param=param)
    for row, text in enumerate(texts):
        if len(text) > chars:
            detail = f"{param}[{row}] has {len(text):,} characters; at most {chars:,} are allowed"
            raise Problem(413, detail, param=param)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Problem(status, f"{param}[{row}] contains {_SURROGATE}", param=param) from None


def check_model(model: str, name: str, model_id: str) -> None:
    """Check that a request names the model that is served.

    Raises:
        Problem: It names another model.
    """
    if model not in (name, model_id, Path(model_id).name, "default"):
        detail = f"the model {model[:200]!r} does not exist; available: {name!r}, 'default'"
        raise Problem(404, detail, param="model", code="model_not_found")


async def embed_texts(
    request: Request,
    texts: Sequence[str],
    *,
    are_queries: bool,
    dimensions: int | None,
    tokens: Any,
) -> tuple[Vectors, int]:
    """Embed texts.

    Returns:
        The vectors, shape (n, d), float32, and the number of tokens.

    Raises:
        Problem: The client requests another dimension than the model's.
    """
    service = service_of(request)
    dimension = service.engine.embedder.dimension
    if dimensions not in (None, dimension):
        detail = f"dimensions must be {dimension} for this model, got {dimensions}"
        raise Problem(invalid_status(request.url.path), detail, param="dimensions")
    kind: Any = "query" if are_queries else "document"
    jobs = (Job(kind, part, tokens=tokens) for part in service.parts(texts))
    rows = await service.run(request, jobs)
    return np.asarray([vector for vector, _ in rows], "<f4"), sum(count for _, count in rows)


@router.post("/search")
async def search(request: Request, body: SearchRequest) -> Response:
    """Find the documents nearest to a query, or to each of several queries."""
    service = service_of(request)
    limits = service.settings.limits
    if (body.query is None) == (body.queries is None):
        raise Problem(422, "exactly one of query and queries is required")
    queries = body.queries if body.query is None else [body.query]
    assert queries is not None
    check_texts(request, queries, limits.queries, "queries")
    if not all(query.strip() for query in queries):
        raise Problem(422, "a query must not be empty", param="queries")
    if body.top_k > limits.top_k:
        raise Problem(422, f"top_k must be at most {limits.top_k}, got {body.top_k}", param="top_k")
    check_limits(body.where, limits, "/search", "where")
    most = len(queries) * min(body.top_k, service.engine.documents)
    if most > limits.results:
        detail = f"the response would have {most:,} results; at most {limits.results:,} are allowed"
        raise Problem(413, detail, param="top_k")
    mode = body.mode or ("hybrid" if body.min_score is None else "dense")
    options = SearchOptions(body.top_k, body.min_score, body.where, mode)  # type: ignore[arg-type]
    found: list[list[SearchResult]] = await service.run(request, [Job("search", queries, options)])
    batches = [
        [{**each._asdict(), "metadata": public_metadata(each.metadata)} for each in results]
        for results in found
    ]
    content = {"batches": batches} if body.query is None else {"results": batches[0]}
    return await json_response(content, limits.answer_bytes)


@router.post("/", include_in_schema=False)
@router.post("/embed")
async def embed(request: Request, body: EmbedRequest) -> Response:
    """Embed texts as text-embeddings-inference does; ``prompt_name`` "query" embeds queries."""
    limits = service_of(request).settings.limits
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not body.normalize:
        raise Problem(422, "vectors always have length 1; omit normalize or set it to true")
    check_texts(request, texts, limits.texts, "inputs")
    vectors, _ = await embed_texts(
        request,
        texts,
        are_queries=body.prompt_name in ("query", "search_query"),
        dimensions=body.dimensions,
        tokens="limit" if body.truncate is False else False,
    )
    return await json_response(list(vectors), limits.answer_bytes)


async def _rank(request: Request, query: str, texts: Sequence[str]) -> list[tuple[float, int]]:
    """Return the score and the place of each text, best first; equal scores by place.

    Raises:
        Problem: There is no reranker, or the request is too large.
    """
    service = service_of(request)
    if service.engine.reranker is None:
        raise Problem(404, "no reranker is configured; start the service with --reranker NAME")
    check_texts(request, [query], 1, "query")
    check_texts(request, texts, service.settings.limits.texts, "texts")
    jobs = (Job("rerank", part, query=query) for part in service.parts(texts))
    scores = await service.run(request, jobs)
    return sorted(((score, row) for row, score in enumerate(scores)), key=lambda p: (-p[0], p[1]))


@router.post("/rerank")
async def rerank(request: Request, body: RerankRequest) -> Response:
    """Score texts as answers to a query, as text-embeddings-inference does."""
    ranks = await _rank(request, body.query, body.texts)
    content: list[dict[str, Any]] = [{"index": row, "score": score} for score, row in ranks]
    if body.return_text:
        content = [{**each, "text": body.texts[each["index"]]} for each in content]
    return await json_response(content, service_of(request).settings.limits.answer_bytes)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank_documents(request: Request, body: OpenAIRerankRequest) -> Response:
    """Score documents as answers to a query, as Cohere and Jina do."""
    settings = service_of(request).settings
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    model_id = settings.reranker or ""
    name = Path(model_id).name  # Without folders of the server.
    if model_id:
        check_model(body.model, name, model_id)
    ranks = await _rank(request, body.query, texts)
    results: list[dict[str, Any]] = []
    for score, row in ranks[: body.top_n]:
        document = {"document": {"text": texts[row]}} if body.return_documents else {}
        results.append({"index": row, "relevance_score": score, **document})
    request_id = request.scope.get("request_id", "")
    content = {"id": request_id, "model": name, "results": results, "meta": {}}
    return await json_response(content, settings.limits.answer_bytes)


def _writable(request: Request) -> Service:
    service = service_of(request)
    if not service.settings.writable:
        raise Problem(403, "the index is read-only; start the service with --writable")
    return service


@router.put("/documents")
async def put_documents(request: Request, body: DocumentsRequest) -> JSONResponse:
    """Add documents and save the index; a document replaces one with the same id."""
    service = _writable(request)
    ids, texts = [each.id for each in body.documents], [each.text for each in body.documents]
    limits = service.settings.limits
    if not texts:
        raise Problem(422, "documents must not be empty", param="documents")
    if len(texts) > limits.texts or sum(map(len, texts)) > limits.change_chars:
        detail = f"at most {limits.texts:,} documents with {limits.change_chars:,} characters"
        raise Problem(413, f"{detail} in total are allowed; send them in several requests")
    name, count = Counter(ids).most_common(1)[0]
    if count > 1:
        detail = f"the id {short_repr(name)} occurs twice; ids must be unique"
        raise Problem(422, detail, param="documents")
    try:
        "".join([*ids, *texts]).encode()
    except UnicodeEncodeError:
        raise Problem(422, f"documents contain {_SURROGATE}", param="documents") from None
    metadata = [each.metadata for each in body.documents]
    await service.change(lambda retriever: retriever.add(texts, metadata, ids))
    return JSONResponse({"ids": ids, "documents": service.engine.documents})


@router.delete("/documents/{document_id:path}")
async def delete_document(request: Request, document_id: str) -> JSONResponse:
    """Delete a document and save the index."""
    service = _writable(request)
    deleted = await service.change(lambda retriever: retriever.delete([document_id]))
    if not deleted:
        raise Problem(404, "no document has this id")
    return JSONResponse({"deleted": deleted, "documents": service.engine.documents})
