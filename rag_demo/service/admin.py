"""``/admin``: models and reloads."""

from __future__ import annotations

from fastapi import APIRouter, Request

from rag_demo.service.responses import JSONResponse
from rag_demo.service.service import service_of

router = APIRouter(prefix="/admin")


@router.get("/models")
async def models(request: Request) -> JSONResponse:
    """List the models and the index with size, state and the time until they are unloaded."""
    hosts = service_of(request).engine.hosts
    found = []
    for name, host in hosts.items():
        status = host.status()
        found.append(
            {
                "name": name,
                "state": status.state,
                "bytes": status.nbytes,
                "expires_in_s": status.expires_in_s,
                "isolation": host.isolation,
                "leases": status.leases,
                "loads": status.loads,
                "unloads": status.unloads,
                "failed": status.last_error is not None,
            }
        )
    return JSONResponse({"models": found})


@router.post("/models/{name:path}/unload")
async def unload(request: Request, name: str) -> JSONResponse:
    """Unload a model or the index; the next request loads it again."""
    return JSONResponse(await service_of(request).unload(name))


@router.post("/reload")
async def reload(request: Request) -> JSONResponse:
    """Open the index again; the old one answers until the new one is open."""
    return JSONResponse(await service_of(request).reload())
