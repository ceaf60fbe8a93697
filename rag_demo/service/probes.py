"""Probes, metrics, information, administration, and the page."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Security
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import FileResponse, PlainTextResponse, Response

from rag_demo.service.responses import BEARER, JSONResponse, Problem
from rag_demo.service.service import service_of

_PAGE = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": "page.html",
    "/page.css": "page.css",
    "/page.js": "page.js",
    "/docs": "docs.html",
    "/docs.js": "docs.js",
}
_TOKEN = [Security(BEARER)]

router = APIRouter()


@router.get("/livez")
async def livez(request: Request) -> JSONResponse:
    """Return 503 if the service does not work on requests and needs a restart."""
    if reason := service_of(request).hang:
        raise Problem(503, reason)
    return JSONResponse({"status": "ok"})


@router.get("/readyz")
@router.get("/health")
async def readyz(request: Request) -> JSONResponse:
    """Return 503 if requests cannot be answered now."""
    service = service_of(request)
    if reason := await service.not_ready():
        raise Problem(503, reason, headers={"retry-after": "1"})
    engine = service.engine
    return JSONResponse(
        {"status": "ok", "documents": engine.documents, "index_version": engine.version}
    )


@router.get("/metrics", response_class=PlainTextResponse, dependencies=_TOKEN)
async def exposition() -> Response:
    """Return all metrics for Prometheus."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


@router.get("/info", dependencies=_TOKEN)
async def info(request: Request) -> JSONResponse:
    """Describe the model and the limits, as text-embeddings-inference does."""
    service = service_of(request)
    engine, settings = service.engine, service.settings
    return JSONResponse(
        {
            "model_id": engine.model_name,
            "model_sha": None,
            "model_dtype": engine.dtype,
            "model_type": {"embedding": {"pooling": "model"}},
            "dimension": engine.model.dimension,
            "max_input_length": engine.model.max_tokens,
            "max_concurrent_requests": settings.max_connections,
            "max_batch_tokens": settings.batch_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": settings.max_texts,
            "auto_truncate": True,
            "tokenization_workers": 1,
            "reranker": engine.reranker.host.name if engine.reranker else None,
            "documents": engine.documents,
            "index_version": engine.version,
            "version": version("torch-cleanup"),
        }
    )


@router.get("/admin/models", dependencies=_TOKEN)
async def models(request: Request) -> JSONResponse:
    """List the models and the index with size, state and the time until they are unloaded."""
    found = []
    for host in service_of(request).engine.hosts.values():
        status = dataclasses.asdict(host.status())
        # The text of an error may name files of the server.
        status["failed"] = status.pop("last_error") is not None
        found.append({**status, "isolation": host.isolation})
    return JSONResponse({"models": found})


@router.post("/admin/models/{name:path}/unload", dependencies=_TOKEN)
async def unload(request: Request, name: str) -> JSONResponse:
    """Unload a model or the index; the next request loads it again."""
    return JSONResponse(await service_of(request).unload(name))


@router.post("/admin/reload", dependencies=_TOKEN)
async def reload(request: Request) -> JSONResponse:
    """Open the index again; the old one answers until the new one is open."""
    return JSONResponse(await service_of(request).reload())


def _serve(path: str, name: str) -> None:
    @router.get(path, include_in_schema=False)
    async def file() -> Any:
        return FileResponse(_PAGE / name)


for _path, _name in PAGE_FILES.items():
    _serve(_path, _name)
