"""create_app: the service as a FastAPI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from rag_demo.service import openai_routes, page_routes, search_routes, state_routes
from rag_demo.service.guard import Guard
from rag_demo.service.opened import LoadModel
from rag_demo.service.problems import Problem, for_http, for_problem, for_validation
from rag_demo.service.running import Running
from rag_demo.service.settings import Settings
from torch_utils import SafePyTorchCleanup
from torch_utils.fastapi import lifespan
from torch_utils.prometheus import register

__all__ = ["create_app"]

_CLOSING_S = 60.0


def create_app(settings: Settings, *, load_model: LoadModel | None = None) -> FastAPI:
    """Make the application; its lifespan opens the index, and closes all when the server stops.

    Args:
        settings: What it serves, and to whom.
        load_model: Loads another embedding model than the one that the index names; see
            `torch_utils.ModelHost`.

    Returns:
        An application whose ``state.running`` is the service, while it runs.
    """

    @lifespan(deadline_s=_CLOSING_S)
    async def serving(app: Any, scope: SafePyTorchCleanup) -> AsyncIterator[dict[str, Any]]:
        register()
        running = Running(settings, load_model)
        try:
            await running.open()
        except Exception as error:
            # Servers only print it; who runs this one has it from here.
            app.state.failure = error
            raise
        scope.callback(running.close)
        app.state.running = running
        yield {"running": running}

    app = FastAPI(
        title="rag-demo",
        summary="Questions to an index of documents.",
        version="1",
        lifespan=cast(Any, serving),  # It yields a mapping always, which its type does not say.
        docs_url=None,  # They load their scripts from elsewhere.
        redoc_url=None,
        redirect_slashes=False,  # To a name that the client has sent, and by HTTP.
        exception_handlers={
            Problem: for_problem,
            HTTPException: for_http,
            RequestValidationError: for_validation,
        },
    )
    for router in (
        search_routes.router,
        openai_routes.router,
        state_routes.router,
        page_routes.router,
        state_routes.admin,
    ):
        app.include_router(router)
    app.add_middleware(Guard, settings=settings)
    return app
