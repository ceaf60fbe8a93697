"""Probes, metrics, information, administration, and the page."""

from __future__ import annotations

import asyncio
import dataclasses
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Security
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import FileResponse, PlainTextResponse, Response

from rag_demo.service.responses import BEARER, Problem, overloaded
from rag_demo.service.service import Running
from torch_utils import live_memory

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
_looking = asyncio.Lock()


@router.get("/livez")
async def livez(service: Running) -> dict[str, Any]:
    """Return 503 if the service does not work on requests and needs a restart."""
    if reason := service.hang:
        raise Problem(503, reason)
    return {"status": "ok"}


@router.get("/readyz")
@router.get("/health")
async def readyz(service: Running) -> dict[str, Any]:
    """Return 503 if requests cannot be answered now."""
    if reason := await service.not_ready():
        raise Problem(503, reason, headers={"retry-after": "1"})
    return service.state(status="ok")


@router.get("/metrics", response_class=PlainTextResponse, dependencies=_TOKEN)
async def exposition() -> Response:
    """Return all metrics for Prometheus."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


@router.get("/info", dependencies=_TOKEN)
async def info(service: Running) -> dict[str, Any]:
    """Describe the model and the limits, as text-embeddings-inference does."""
    return service.state(
        model_id=service.model_name,
        model_dtype=service.identity.dtype or "float32",
        model_type={"embedding": {"pooling": "model"}},
        dimension=service.lanes["model"].dimension,
        max_input_length=service.lanes["model"].max_tokens,
        max_batch_tokens=service.settings.batch_tokens,
        max_client_batch_size=service.limits.max_texts,
        reranker=Path(service.settings.reranker or "").name or None,
        version=version("torch-cleanup"),
    )


@router.get("/admin/models", dependencies=_TOKEN)
async def models(service: Running) -> dict[str, Any]:
    """List the models and the index with size, state and the time until they are unloaded."""
    found = [dataclasses.asdict(each.host.status()) for each in service.lanes.values()]
    for status in found:  # The text of an error may name files of the server.
        status["failed"] = status.pop("last_error") is not None
    if found[-1]["state"] == "loaded":  # The host does not count mapped files.
        found[-1] |= {"nbytes": service.index.nbytes, "nbytes_by_device": None}
    return {"models": found}


@router.post("/admin/models/{name:any}/unload", dependencies=_TOKEN)
async def unload(service: Running, name: str) -> dict[str, Any]:
    """Unload a model or the index; the next request loads it again."""
    return await service.unload(name)


@router.get("/debug/memory", dependencies=_TOKEN)
async def memory(least_bytes: Annotated[int, Query(ge=1)] = 1 << 20) -> dict[str, Any]:
    """List the tensors that are alive, the largest first, with what holds them."""
    if _looking.locked():  # It walks through all objects, and other threads wait.
        raise overloaded(5, "another request looks at the memory")

    def look() -> dict[str, Any]:
        found = live_memory(least_bytes=least_bytes)
        entries = [each.as_dict() for each in found.entries]
        return {"total_bytes": found.total_bytes, "entries": entries}

    async with _looking:
        return await asyncio.to_thread(look)


@router.post("/admin/reload", dependencies=_TOKEN)
async def reload(service: Running) -> dict[str, Any]:
    """Open the index again; the old one answers until the new one is open."""
    await service.index.reload()
    service.lanes["index"].error = None  # Searches need not wait for the next load.
    return service.state()


def _serve(path: str, name: str) -> None:
    @router.get(path, include_in_schema=False)
    async def file() -> Any:
        return FileResponse(_PAGE / name, headers=_PAGE_HEADERS)


_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}
for _path, _name in PAGE_FILES.items():
    _serve(_path, _name)
