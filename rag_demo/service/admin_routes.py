"""Probes, metrics, information, administration, and the page."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from rag_demo.service import metrics
from rag_demo.service.problems import Problem
from rag_demo.service.service import service_of

_NEVER = "0001-01-01T00:00:00Z"  # what `ollama ps` gets for a model that stays loaded
_PAGE = Path(__file__).parent / "page"

router = APIRouter()


@router.get("/livez")
async def livez(request: Request) -> JSONResponse:
    """Return 503 if the service does not work on requests and needs a restart."""
    if reason := service_of(request).batcher.failure:
        raise Problem(503, reason)
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
@router.get("/health")
async def readyz(request: Request) -> JSONResponse:
    """Return 503 if requests cannot be answered now."""
    service = service_of(request)
    if reason := await service.not_ready():
        raise Problem(503, reason, headers={"retry-after": "1"})
    return JSONResponse({"status": "ok", "documents": service.engine.documents})


@router.get("/metrics", response_class=PlainTextResponse)
async def exposition() -> Response:
    """Return all metrics for Prometheus."""
    media_type, text = metrics.exposition()
    return Response(text, media_type=media_type)


@router.get("/memory")
async def memory(request: Request) -> JSONResponse:
    """Return the memory of the last minutes, with the loads and unloads."""
    return JSONResponse(service_of(request).memory())


@router.get("/info")
async def info(request: Request) -> JSONResponse:
    """Describe the model and the limits, as text-embeddings-inference does."""
    service = service_of(request)
    engine, limits = service.engine, service.settings.limits
    return JSONResponse(
        {
            "model_id": engine.model_name,
            "model_sha": None,
            "model_dtype": engine.dtype,
            "model_type": {"embedding": {"pooling": "model"}},
            "dimension": engine.embedder.dimension,
            "max_input_length": engine.embedder.max_tokens,
            "max_concurrent_requests": limits.waiting_texts,
            "max_client_batch_size": limits.texts,
            "max_batch_requests": limits.batch_texts,
            "auto_truncate": True,
            "reranker": engine.reranker.name if engine.reranker else None,
            "documents": engine.documents,
            "version": version("torch-cleanup"),
        }
    )


@router.get("/admin/models")
async def models(request: Request) -> JSONResponse:
    """List the models of this process with size, state and expiry, as `ollama ps` does."""
    service = service_of(request)
    now = datetime.datetime.now(datetime.timezone.utc)
    found: list[dict[str, Any]] = []
    for name, host in service.engine.hosts.items():
        status = host.status()
        expires_at = _NEVER
        if status.expires_in_s is not None:
            expires_at = (now + datetime.timedelta(seconds=status.expires_in_s)).isoformat()
        found.append(
            {
                "name": name,
                "model": name,
                "size": status.nbytes,
                "expires_at": expires_at,
                "state": status.state,
                "isolation": host.isolation,
                "leases": status.leases,
                "loads": status.loads,
                "unloads": status.unloads,
                "failed": status.last_error is not None,
            }
        )
    return JSONResponse({"models": found, **service.process})


@router.post("/admin/models/{name:path}/unload")
async def unload(request: Request, name: str) -> JSONResponse:
    """Unload a model or the index of this process; the next request loads it again."""
    return JSONResponse(await service_of(request).unload(name))


@router.post("/admin/reload")
async def reload(request: Request) -> JSONResponse:
    """Open the index again; the old one answers until the new one is open."""
    service = service_of(request)
    report = await service.reload()
    service.on_reload()
    return JSONResponse(report)


@router.get("/", include_in_schema=False)
@router.get("/page.css", include_in_schema=False)
@router.get("/page.js", include_in_schema=False)
async def page(request: Request) -> FileResponse:
    """Return the page, its style or its script."""
    return FileResponse(_PAGE / (request.url.path[1:] or "page.html"))
