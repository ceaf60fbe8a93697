"""``/documents``: reading and changing the index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from rag_demo.documents.document import Document
from rag_demo.retriever import embed
from rag_demo.searching.arguments import check_documents
from rag_demo.service.engine import shards_of
from rag_demo.service.jobs import EmbedJob
from rag_demo.service.responses import JSONResponse, Problem, at_most, respond
from rag_demo.service.schemas import DeleteRequest, DocumentsRequest, NewDocument
from rag_demo.service.service import Service, service_of
from torch_utils.hosting.lease import run_in_thread

router = APIRouter(prefix="/documents")
_CHUNK_DOCUMENTS, _CHUNK_BYTES = 256, 1 << 20  # of a stream, for each change


def _writable(request: Request) -> Service:
    """Return the service if clients may change the index.

    Raises:
        Problem: They may not.
    """
    service = service_of(request)
    if not service.settings.writable:
        raise Problem(403, "the index is read-only; start the service with --writable")
    return service


def _checked_documents(documents: Sequence[NewDocument]) -> list[Document]:
    """Return documents for a retriever.

    Raises:
        Problem: An id occurs twice, or metadata are not JSON.
    """
    fields = [(each.text, each.metadata, each.id) for each in documents]
    try:
        texts, metadata, ids = check_documents(*map(list, zip(*fields, strict=True)))
    except (TypeError, ValueError) as error:
        raise Problem(422, str(error)[:500], param="documents") from None
    return list(map(Document, ids or (), texts, metadata))


async def _add(request: Request | None, service: Service, new: Sequence[NewDocument]) -> None:
    """Embed documents through the queue, then add and save them.

    Raises:
        Problem: The documents are invalid, the queue is too long, or the change failed.
    """
    deadline, loop, hosted = service.deadline(), asyncio.get_running_loop(), service.engine.model
    documents = _checked_documents(new)

    def embed_documents(texts: Sequence[str]) -> Any:
        running = service.run(request, EmbedJob(texts, hosted.max_tokens), deadline)
        rows = asyncio.run_coroutine_threadsafe(running, loop).result()
        return np.asarray([vector for vector, _ in rows], np.float32)

    model: Any = SimpleNamespace(
        identity=hosted.identity, dimension=hosted.dimension, embed_documents=embed_documents
    )
    batch = await run_in_thread(lambda: embed(documents, model))
    await service.change(lambda retriever: retriever.store.upsert(batch), deadline)


def _counts(service: Service, **more: Any) -> dict[str, Any]:
    engine = service.engine
    return {**more, "documents": engine.documents, "index_version": engine.version}


@router.put("")
async def put(request: Request, body: DocumentsRequest) -> JSONResponse:
    """Add documents and save the index; a document replaces one with the same id."""
    service = _writable(request)
    at_most(len(body.documents), service.settings.max_texts, "documents", "documents")
    await _add(request, service, body.documents)
    return respond(request, _counts(service, ids=[each.id for each in body.documents]))


_LINES = {
    "required": True,
    "description": "In each line a document, as in PUT.",
    "content": {"application/x-ndjson": {"schema": {"type": "string"}}},
}


@router.post("/bulk", openapi_extra={"requestBody": _LINES})
async def bulk(request: Request) -> Response:
    """Add documents from lines of JSON while they arrive.

    The response is a line of JSON for each change that is saved, and in the end a line with the
    total or with the error; earlier changes stay.
    """
    service = _writable(request)

    async def lines() -> AsyncIterator[dict[str, Any]]:
        added = 0
        try:
            async for documents in _chunks(request, service.settings.max_body_bytes):
                await _add(None, service, documents)
                added += len(documents)
                yield _counts(service, added=added)
            yield _counts(service, added=added, finished=True)
        except Problem as problem:
            if not added:  # No response has begun.
                raise
            yield {"status": problem.status_code, "error": problem.detail, "added": added}

    found = lines()
    first = await anext(found)  # Its problem has a response of its own.

    async def encoded() -> AsyncIterator[bytes]:
        yield orjson.dumps(first) + b"\n"
        async for line in found:
            yield orjson.dumps(line) + b"\n"

    return StreamingResponse(encoded(), media_type="application/x-ndjson")


async def _chunks(request: Request, most: int) -> AsyncIterator[list[NewDocument]]:
    """Yield documents of a body in lines. Reading waits while a chunk is being added.

    Raises:
        Problem: A line is not a document or is too long.
    """
    rest, number, size = b"", 0, 0
    documents: dict[str, NewDocument] = {}
    async for part in request.stream():
        *whole, rest = (rest + part).split(b"\n")
        if not part and rest:  # The last line has no end.
            whole, rest = [rest], b""
        if len(rest) > most:
            raise Problem(413, f"line {number + 1} has more than {most:,} bytes")
        for line in whole:
            number += 1
            if line.strip():
                try:
                    document = NewDocument.model_validate_json(line)
                except ValidationError as error:
                    first = error.errors(include_input=False)[0]
                    where = "/".join(["", *map(str, first["loc"])])
                    raise Problem(422, f"line {number}, #{where}: {first['msg']}") from None
                documents[document.id] = document
                size += len(line)
            if len(documents) >= _CHUNK_DOCUMENTS or size >= _CHUNK_BYTES:
                yield list(documents.values())
                documents, size = {}, 0
    if documents:
        yield list(documents.values())


@router.post("/delete")
async def delete_several(request: Request, body: DeleteRequest) -> JSONResponse:
    """Delete documents by ids or by a filter, and save the index."""
    service, where = _writable(request), body.where

    def change(retriever: Any) -> int:
        found = (shard.store.matching(where) for shard in shards_of(retriever))
        deleted: int = retriever.delete(body.ids or [*chain.from_iterable(found)])
        return deleted

    deleted = await service.change(change, service.deadline())
    return respond(request, _counts(service, deleted=deleted))


@router.get("/{document_id:path}")
async def get(request: Request, document_id: str) -> Response:
    """Return a document."""
    service = service_of(request)

    def read() -> Document | None:
        with service.engine.index.lease(1.0) as retriever:
            found: list[Document | None] = retriever.get([document_id])
            return found[0]

    document = await run_in_thread(read)
    if document is None:
        raise Problem(404, "no document has this id")
    return respond(request, document._asdict())


@router.delete("/{document_id:path}")
async def delete(request: Request, document_id: str) -> JSONResponse:
    """Delete a document and save the index."""
    service = _writable(request)
    deadline = service.deadline()
    deleted = await service.change(lambda retriever: retriever.delete([document_id]), deadline)
    if not deleted:
        raise Problem(404, "no document has this id")
    return respond(request, _counts(service, deleted=deleted))
