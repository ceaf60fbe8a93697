"""``/documents``: reading and changing the index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import APIRouter, Depends, Query, Request
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from rag_demo.documents.document import Document
from rag_demo.retriever import embed
from rag_demo.searching.arguments import check_documents
from rag_demo.service import engine
from rag_demo.service.lane import Job
from rag_demo.service.responses import Problem, at_most, respond
from rag_demo.service.schemas import DeleteRequest, DocumentsRequest, NewDocument
from rag_demo.service.service import Running, Service

router = APIRouter(prefix="/documents")
_CHUNK_DOCUMENTS, _CHUNK_BYTES = 256, 1 << 16  # of a stream, for each change: about one batch
_PAGE = 100


async def _writable(service: Running) -> Service:
    """Return the service if clients may change the index.

    Raises:
        Problem: They may not.
    """
    if not service.settings.writable:
        raise Problem(403, "the index is read-only; start the service with --writable")
    return service


Writable = Annotated[Service, Depends(_writable)]


async def _add(request: Request | None, service: Service, new: Sequence[NewDocument]) -> list[str]:
    """Embed documents through the queue, then add and save them.

    Returns:
        Their ids. The index chooses the ids of documents without one.

    Raises:
        Problem: The documents are invalid, the queue is too long, or the change failed.
    """
    deadline, loop = service.deadline(), asyncio.get_running_loop()
    names = [each.id for each in new if each.id is not None]
    if names and len(names) < len(new):
        raise Problem(422, "either all documents of a change have an id, or none", param="id")
    try:
        texts, metadata, ids = check_documents(
            [each.text for each in new], [each.metadata for each in new], names or None
        )
    except (TypeError, ValueError) as error:  # An id occurs twice, or metadata are not JSON.
        raise Problem(422, str(error)[:500], param="documents") from None
    documents = list(map(Document, ids or [""] * len(texts), texts, metadata))

    def embed_documents(texts: Sequence[str]) -> Any:
        embedding = service.run_counted(
            request, "model", partial(engine.embed, "document"), texts, deadline
        )
        return np.stack(asyncio.run_coroutine_threadsafe(embedding, loop).result()[0])

    model: Any = SimpleNamespace(dimension=None, embed_documents=embed_documents)
    model.identity, model.count_tokens = service.engine.identity, engine.estimate
    model.max_tokens = service.engine.model.max_tokens
    batch = await asyncio.to_thread(embed, documents, model)
    added: list[str] = await service.change(
        lambda retriever: retriever.store.upsert(batch, choose_ids=not names), deadline
    )
    return added


@router.put("")
async def put(request: Request, service: Writable, body: DocumentsRequest) -> dict[str, Any]:
    """Add documents and save the index; a document replaces one with the same id."""
    at_most(len(body.documents), service.limits.max_texts, "documents", "documents")
    return service.state(ids=await _add(request, service, body.documents))


_LINES = {"application/x-ndjson": {"schema": {"type": "string"}}}


@router.post("/bulk", openapi_extra={"requestBody": {"required": True, "content": _LINES}})
async def bulk(request: Request, service: Writable) -> Response:
    """Add documents from lines of JSON, each as in PUT, while they arrive.

    The response is a line of JSON for each change that is saved, and in the end a line with the
    total or with the error; earlier changes stay.
    """

    async def lines() -> AsyncIterator[dict[str, Any]]:
        added = 0
        try:
            async for documents in _chunks(request, service.limits.max_body_bytes):
                ids = await _add(None, service, documents)
                added += len(documents)
                yield service.state(added=added, ids=ids)
            yield service.state(added=added, finished=True)
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
    documents: dict[Any, NewDocument] = {}
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
                documents[number if document.id is None else document.id] = document
                size += len(line)
            if len(documents) >= _CHUNK_DOCUMENTS or size >= _CHUNK_BYTES:
                yield list(documents.values())
                documents, size = {}, 0
    if documents:
        yield list(documents.values())


@router.post("/delete")
async def delete_several(service: Writable, body: DeleteRequest) -> dict[str, Any]:
    """Delete documents by ids or by a filter, and save the index."""

    def change(retriever: Any) -> int:
        found = (shard.store.matching(body.where) for shard in engine.shards_of(retriever))
        deleted: int = retriever.delete(body.ids or [*chain.from_iterable(found)])
        return deleted

    return service.state(deleted=await service.change(change, service.deadline()))


async def _read(request: Request, service: Service, compute: Any, key: Any) -> Any:
    job = Job(compute, [key], [1])
    return (await service.lanes["index"].run(request, job, service.deadline()))[0]


@router.get("")
async def page(
    request: Request,
    service: Running,
    limit: Annotated[int, Query(ge=1)] = _PAGE,
    after: str | None = None,
) -> Response:
    """Return the documents whose ids come after one, ordered by id."""
    at_most(limit, service.limits.max_top_k, "documents in a page", "limit")
    found = await _read(request, service, service.engine.page, (limit, after))
    documents = [each._asdict() for each in found]
    last = documents[-1]["id"] if len(documents) == limit else None
    return respond(request, {"documents": documents, "next": last})


@router.get("/{document_id:any}")
async def get(request: Request, service: Running, document_id: str) -> Response:
    """Return a document."""
    document = await _read(request, service, service.engine.get, document_id)
    if document is None:
        raise Problem(404, "no document has this id")
    return respond(request, document._asdict())


@router.delete("/{document_id:any}")
async def delete(service: Writable, document_id: str) -> dict[str, Any]:
    """Delete a document and save the index."""
    state = await delete_several(service, DeleteRequest.model_construct(ids=[document_id]))
    if not state["deleted"]:
        raise Problem(404, "no document has this id")
    return state
