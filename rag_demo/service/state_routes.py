"""Probes, metrics, memory, and what an administrator does."""

from __future__ import annotations

import datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from rag_demo.service import metrics
from rag_demo.service.answers import REFUSAL, Memory, Models, Ready, Reloaded, Unloaded
from rag_demo.service.problems import AsciiJSON, Problem
from rag_demo.service.running import RELOADED
from rag_demo.service.search_routes import running_of

__all__ = ["admin", "router"]

router = APIRouter(responses=REFUSAL, default_response_class=AsciiJSON)
admin = APIRouter(prefix="/admin", responses=REFUSAL, default_response_class=AsciiJSON)
_NEVER = "0001-01-01T00:00:00Z"  # as `ollama ps` is told of a model that stays


@router.get("/livez", response_model=None, responses={200: {"model": Ready}})
async def livez(request: Request) -> AsciiJSON:
    """Say that the event loop runs, and that requests are worked on; whatever else does."""
    if not running_of(request).batcher.is_alive:
        raise Problem(503, "requests are not worked on any more; restart the service")
    return AsciiJSON({"status": "ok"})


@router.get("/readyz", response_model=None, responses={200: {"model": Ready}})
@router.get("/health", response_model=None, responses={200: {"model": Ready}})
async def readyz(request: Request) -> AsciiJSON:
    """Say whether the index can be searched."""
    running = running_of(request)
    reason = await running.not_ready()
    if reason:
        raise Problem(503, reason, headers={"retry-after": "1"})
    return AsciiJSON({"status": "ok", "documents": running.opened.documents})


@router.get(
    "/metrics",
    response_model=None,
    response_class=PlainTextResponse,
    responses={200: {"content": {"text/plain": {}}, "description": "All metrics."}},
)
async def exposition() -> Response:
    """Write the metrics for Prometheus."""
    media_type, text = metrics.exposition()
    return Response(text, media_type=media_type)


@router.get("/memory", response_model=None, responses={200: {"model": Memory}})
async def memory(request: Request) -> AsciiJSON:
    """Describe the memory of the last minutes, with the loads and unloads in them."""
    return AsciiJSON(running_of(request).memory())


@admin.get("/models", response_model=None, responses={200: {"model": Models}})
async def models(request: Request) -> AsciiJSON:
    """Say what this process has loaded, how large it is, until when: as `ollama ps` is told."""
    running = running_of(request)
    now = datetime.datetime.now(datetime.timezone.utc)
    found: list[dict[str, Any]] = []
    for name, host in running.opened.hosts.items():
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
    return AsciiJSON({"models": found, **running.who_answers})


@admin.post("/models/{name}/unload", response_model=None, responses={200: {"model": Unloaded}})
async def unload(request: Request, name: str) -> AsciiJSON:
    """Give a model, or the index, of this process back; the next request loads it again."""
    return AsciiJSON(await running_of(request).unload(name))


@admin.post("/reload", response_model=None, responses={200: {"model": Reloaded}})
async def reload(request: Request) -> AsciiJSON:
    """Open the index as it is now; the old one answers until this one can."""
    running = running_of(request)
    report = await running.reload()
    running.tell(RELOADED)  # A supervisor has the other workers do the same.
    return AsciiJSON(report)
