"""Probes, metrics, information, and administration."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from rag_demo.service import metrics
from rag_demo.service.problems import Problem
from rag_demo.service.responses import JSONAnswer
from rag_demo.service.schemas import responses
from rag_demo.service.service import service_of

__all__ = ["router"]

_NEVER = "0001-01-01T00:00:00Z"  # what `ollama ps` gets for a model that stays loaded

router = APIRouter()


@router.get("/livez", response_model=None, responses=responses(dict[str, str], 503))
async def livez(request: Request) -> JSONAnswer:
    """Say that requests are worked on; 503 if only a restart helps."""
    if reason := service_of(request).batcher.failure:
        raise Problem(503, reason)
    return JSONAnswer({"status": "ok"})


@router.get("/readyz", response_model=None, responses=responses(dict[str, Any], 503))
@router.get("/health", response_model=None, responses=responses(dict[str, Any], 503))
async def readyz(request: Request) -> JSONAnswer:
    """Say whether requests can be answered."""
    service = service_of(request)
    if reason := await service.not_ready():
        raise Problem(503, reason, headers={"retry-after": "1"})
    return JSONAnswer({"status": "ok", "documents": service.engine.documents})


@router.get(
    "/metrics",
    response_model=None,
    response_class=PlainTextResponse,
    responses={**responses(), 200: {"content": {"text/plain": {}}, "description": "Metrics."}},
)
async def exposition() -> Response:
    """Return all metrics for Prometheus."""
    media_type, text = metrics.exposition()
    return Response(text, media_type=media_type)


@router.get("/memory", response_model=None, responses=responses())
async def memory(request: Request) -> JSONAnswer:
    """Return the memory of the last minutes, with the loads and unloads in it."""
    return JSONAnswer(service_of(request).memory())


@router.get("/info", response_model=None, responses=responses())
async def info(request: Request) -> JSONAnswer:
    """Describe the model and the limits, as text-embeddings-inference does."""
    service = service_of(request)
    engine, limits = service.engine, service.settings.limits
    return JSONAnswer(
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


@router.get("/admin/models", response_model=None, responses=responses())
async def models(request: Request) -> JSONAnswer:
    """Say what this process has loaded, how large it is and until when, as `ollama ps` does."""
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
    return JSONAnswer({"models": found, **service.process})


@router.post("/admin/models/{name:path}/unload", response_model=None, responses=responses())
async def unload(request: Request, name: str) -> JSONAnswer:
    """Unload a model or the index of this process; the next request loads it again."""
    return JSONAnswer(await service_of(request).unload(name))


@router.post("/admin/reload", response_model=None, responses=responses())
async def reload(request: Request) -> JSONAnswer:
    """Open the index as it is now; the old one answers until the new one can."""
    service = service_of(request)
    report = await service.reload()
    service.on_reload()
    return JSONAnswer(report)
