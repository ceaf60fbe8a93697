"""``/admin``: models and reloads."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter, Request

from rag_demo.service.responses import JSONResponse
from rag_demo.service.service import service_of

router = APIRouter(prefix="/admin")


@router.get("/models")
async def models(request: Request) -> JSONResponse:
    """List the models and the index with size, state and the time until they are unloaded."""
    found = []
    for host in service_of(request).engine.hosts.values():
        status = dataclasses.asdict(host.status())
        # The text of an error may name files of the server.
        status["failed"] = status.pop("last_error") is not None
        found.append({**status, "isolation": host.isolation})
    return JSONResponse({"models": found})


@router.post("/models/{name:path}/unload")
async def unload(request: Request, name: str) -> JSONResponse:
    """Unload a model or the index; the next request loads it again."""
    return JSONResponse(await service_of(request).unload(name))


@router.post("/reload")
async def reload(request: Request) -> JSONResponse:
    """Open the index again; the old one answers until the new one is open."""
    return JSONResponse(await service_of(request).reload())
