"""``/documents``: reading and changing the index."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from rag_demo.retriever import embed
from rag_demo.search_request import check_documents
from rag_demo.service import models
from rag_demo.service.lane import Job
from rag_demo.service.responses import Problem, at_most, respond
from rag_demo.service.schemas import DeleteRequest, DocumentsRequest, JSONRoute
from rag_demo.service.service import Running, Service

router = APIRouter(prefix="/documents", route_class=JSONRoute)
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


@router.put("")
async def put(request: Request, service: Writable, body: DocumentsRequest) -> dict[str, Any]:
    """Add documents and save the index; a document replaces one with the same id."""
    new, deadline, loop = body.documents, service.deadline(), asyncio.get_running_loop()
    at_most(len(new), service.limits.max_texts, "documents", "documents")
    names: Any = [each.id for each in new]
    names = names if any(names) else None
    if names and not all(names):
        raise Problem(
            422, "only some documents have an id; give one to all or to none", param="documents"
        )
    texts, metadata = [each.text for each in new], [each.metadata for each in new]
    try:
        documents = await asyncio.to_thread(check_documents, texts, metadata, names)
    except (TypeError, ValueError) as error:
        # An id occurs twice, or metadata are not JSON.
        raise Problem(422, str(error)[:500], param="documents") from None

    def embed_documents(texts: Sequence[str]) -> Any:
        embedding = service.run_counted(
            request, "model", partial(models.embed, "document"), texts, deadline
        )
        return np.stack(asyncio.run_coroutine_threadsafe(embedding, loop).result()[0])

    model: Any = SimpleNamespace(dimension=None, embed_documents=embed_documents)
    model.identity, model.count_tokens = service.identity, models.estimate
    model.max_tokens = service.lanes["model"].max_tokens
    batch = await asyncio.to_thread(embed, documents, model)
    added = await service.change(
        lambda retriever: retriever.store.upsert(batch, choose_ids=names is None), deadline
    )
    return service.state(ids=added)


@router.post("/delete")
async def delete_several(service: Writable, body: DeleteRequest) -> dict[str, Any]:
    """Delete documents by ids or by a filter, and save the index."""

    deleted = await service.change(
        lambda retriever: retriever.delete(body.ids or (), where=body.where), service.deadline()
    )
    return service.state(deleted=deleted)


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
    found = await _read(request, service, service.index.page, (limit, after))
    size = sum(len(each.text) for each in found)
    at_most(size, service.limits.max_response_bytes, "characters in a page", "limit")
    documents = [each._asdict() for each in found]
    last = documents[-1]["id"] if len(documents) == limit else None
    return respond(request, {"documents": documents, "next": last})


@router.get("/{document_id:any}")
async def get(request: Request, service: Running, document_id: str) -> Response:
    """Return a document."""
    document = await _read(request, service, service.index.get, document_id)
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
