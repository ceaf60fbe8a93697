"""create_app: the service as a FastAPI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

from fastapi import FastAPI, Security
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from rag_demo.service import documents, embed, probes, search
from rag_demo.service.engine import LoadModel
from rag_demo.service.guard import Guard
from rag_demo.service.responses import BEARER, respond_to_error
from rag_demo.service.service import Service
from rag_demo.service.settings import Limits, Settings
from torch_utils import SafePyTorchCleanup
from torch_utils.fastapi import lifespan
from torch_utils.prometheus import register

__all__ = ["create_app"]

_CLOSING_S = 10.0
_ERRORS: dict[str, Any] = {"application/problem+json": {}, "application/json": {}}


def create_app(
    settings: Settings,
    *,
    limits: Limits = Limits(),  # noqa: B008  (it cannot be changed)
    load_model: LoadModel | None = None,
) -> FastAPI:
    """Create the application. Its lifespan opens the index and closes everything at the end.

    The models are loaded in the background; ``/readyz`` tells when they are.

    Args:
        settings: The service's settings.
        limits: The service's limits.
        load_model: Loads the embedding model. By default the service loads the model that
            the settings or the index name. See `torch_utils.ModelHost`.

    Returns:
        An application with the `Service` as ``state.service`` while it runs.
    """

    @lifespan(deadline_s=_CLOSING_S)
    async def serving(app: Any, scope: SafePyTorchCleanup) -> AsyncIterator[dict[str, Any]]:
        register()
        app.state.service = service = Service(settings, limits, load_model)
        for hosted in service.engine.hosted.values():
            scope.manage(hosted.host)
        scope.callback(service.close)  # Before the hosts.
        yield {"service": service}

    app = FastAPI(
        title="rag-demo",
        version="2",
        lifespan=cast(Any, serving),  # Its type does not say that it always yields a mapping.
        docs_url=None,  # FastAPI's pages load scripts from a CDN.
        redoc_url=None,
        redirect_slashes=False,  # A redirect would go to the host that the client names.
        responses={"default": {"description": "An error.", "content": _ERRORS}},
        exception_handlers=dict.fromkeys((HTTPException, RequestValidationError), respond_to_error),
    )
    app.state.service = None
    modules = (probes, search, embed, documents)
    for module in modules:
        # The guard checks tokens, before it reads a body; this describes them.
        app.include_router(module.router, dependencies=[Security(BEARER)] * (module is not probes))
    routes = [route for module in modules for route in module.router.routes]
    app.add_middleware(Guard, settings=settings, limits=limits, routes=routes)
    return app
