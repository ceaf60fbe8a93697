"""``/search``, ``/embed`` of text-embeddings-inference, and changes of the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from rag_demo.retriever import SearchResult
from rag_demo.service.batcher import Job
from rag_demo.service.engine import SearchOptions
from rag_demo.service.filters import check_limits
from rag_demo.service.metadata import public_metadata
from rag_demo.service.problems import Problem, invalid_status
from rag_demo.service.responses import JSONAnswer, large_answer
from rag_demo.service.schemas import (
    DocumentsRequest,
    EmbedRequest,
    SearchAnswer,
    SearchRequest,
    responses,
)
from rag_demo.service.service import Service, service_of
from rag_demo.vectors import Vectors

__all__ = ["check_texts", "embed_texts", "router", "send"]

_SMALL_BYTES = 1 << 16
_RESULT_BYTES = 512  # of a result's JSON, about, without its text
_NUMBER_BYTES = 12

router = APIRouter()


def check_texts(request: Request, texts: Sequence[str], most: int, param: str) -> None:
    """Refuse too many texts, texts that are too long, and lone surrogates.

    Raises:
        Problem: There are some.
    """
    chars = service_of(request).settings.limits.query_chars
    status = invalid_status(request.url.path)
    if not texts:
        raise Problem(status, f"{param} is empty", param=param)
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
            raise Problem(status, f"{param}[{row}] has a lone surrogate", param=param) from None


async def send(request: Request, content: Any, size: int) -> Response:
    """Answer with content of about ``size`` bytes."""
    if size <= _SMALL_BYTES:
        return JSONAnswer(content)
    return await large_answer(content, service_of(request).settings.limits.answer_bytes)


async def embed_texts(
    request: Request,
    texts: Sequence[str],
    *,
    are_queries: bool,
    dimensions: int | None,
    tokens: Any,
) -> tuple[Vectors, int]:
    """Embed texts in jobs of a batch's size, so that other requests get their turn between them.

    Returns:
        The vectors, shape (n, d), float32, and the count of tokens.

    Raises:
        Problem: The vectors have another dimension than the client wants.
    """
    service = service_of(request)
    size, deadline = service.settings.limits.batch_texts, service.deadline()
    rows: list[tuple[Any, int]] = []
    for start in range(0, len(texts), size):
        kind: Any = "query" if are_queries else "document"
        job = Job(kind, texts[start : start + size], tokens=tokens)
        rows += await service.batcher.run(request, job, deadline, is_continuation=start > 0)
        if dimensions not in (None, len(rows[0][0])):
            detail = f"the vectors of this model have {len(rows[0][0])} dimensions"
            raise Problem(invalid_status(request.url.path), detail, param="dimensions")
    return np.asarray([vector for vector, _ in rows], "<f4"), sum(count for _, count in rows)


@router.post("/search", response_model=None, responses=responses(SearchAnswer, 400, 413, 422))
async def search(request: Request, body: SearchRequest) -> Response:
    """Find the documents nearest to a query, or to each of several."""
    service = service_of(request)
    limits = service.settings.limits
    if (body.query is None) == (body.queries is None):
        raise Problem(422, "give either query or queries")
    queries = body.queries if body.query is None else [body.query]
    assert queries is not None
    check_texts(request, queries, limits.queries, "queries")
    if not all(query.strip() for query in queries):
        raise Problem(422, "a query is empty")
    if body.top_k > limits.top_k:
        raise Problem(422, f"top_k is at most {limits.top_k}", param="top_k")
    check_limits(body.where, limits, "/search", "where")
    most = len(queries) * min(body.top_k, service.engine.documents)
    if most > limits.results:
        detail = f"the answer would have {most:,} results; at most {limits.results:,} are allowed"
        raise Problem(413, detail, param="top_k")
    mode = body.mode or ("hybrid" if body.min_score is None else "dense")
    options = SearchOptions(body.top_k, body.min_score, body.where, mode)  # type: ignore[arg-type]
    found: list[list[SearchResult]] = await service.run(request, Job("search", queries, options))
    size = sum(len(result.text) + _RESULT_BYTES for results in found for result in results)
    shaped = [
        [{**each._asdict(), "metadata": public_metadata(each.metadata)} for each in results]
        for results in found
    ]
    content = {"batches": shaped} if body.query is None else {"results": shaped[0]}
    return await send(request, content, size)


@router.post("/", include_in_schema=False, response_model=None)
@router.post("/embed", response_model=None, responses=responses(list[list[float]], 413, 422))
async def embed(request: Request, body: EmbedRequest) -> Response:
    """Embed texts, as text-embeddings-inference does; ``prompt_name`` "query" for questions."""
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not body.normalize:
        raise Problem(422, "vectors of this service have length 1; leave normalize true")
    check_texts(request, texts, service_of(request).settings.limits.texts, "inputs")
    vectors, _ = await embed_texts(
        request,
        texts,
        are_queries=body.prompt_name in ("query", "search_query"),
        dimensions=body.dimensions,
        tokens="limit" if body.truncate is False else False,
    )
    return await send(request, list(vectors), vectors.size * _NUMBER_BYTES)


def _writable(request: Request) -> Service:
    service = service_of(request)
    if not service.settings.writable:
        raise Problem(403, "this index is read-only; start the service with --writable")
    return service


@router.put("/documents", response_model=None, responses=responses(dict[str, Any], 403, 422))
async def put_documents(request: Request, body: DocumentsRequest) -> JSONAnswer:
    """Add documents and save the index; a document with a known id replaces the old one."""
    service = _writable(request)
    ids, texts = [each.id for each in body.documents], [each.text for each in body.documents]
    limits = service.settings.limits
    if not texts:
        raise Problem(422, "documents is empty", param="documents")
    if len(texts) > limits.texts or sum(map(len, texts)) > limits.change_chars:
        detail = f"send at most {limits.texts:,} documents of {limits.change_chars:,} characters"
        raise Problem(413, f"{detail} together at a time: requests wait for a change")
    if len(set(ids)) < len(ids):
        raise Problem(422, "an id occurs twice", param="documents")
    try:
        "".join([*ids, *texts]).encode()
    except UnicodeEncodeError:
        raise Problem(422, "a document has a lone surrogate", param="documents") from None
    metadata = [each.metadata for each in body.documents]
    await service.change(lambda retriever: retriever.add(texts, metadata, ids))
    return JSONAnswer({"ids": ids, "documents": service.engine.documents})


@router.delete(
    "/documents/{document_id:path}", response_model=None, responses=responses(dict[str, Any], 404)
)
async def delete_document(request: Request, document_id: str) -> JSONAnswer:
    """Remove a document and save the index."""
    service = _writable(request)
    deleted = await service.change(lambda retriever: retriever.delete([document_id]))
    if not deleted:
        raise Problem(404, "there is no document with this id")
    return JSONAnswer({"deleted": deleted, "documents": service.engine.documents})
