"""create_app and run_server: the application, and uvicorn, which loses no request when it stops."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import socket
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import uvicorn
from fastapi import FastAPI, Security
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from rag_demo.errors import RagDemoError
from rag_demo.service import document_routes, probes, search_routes
from rag_demo.service.guard import Guard
from rag_demo.service.models import LoadModel
from rag_demo.service.responses import BEARER, respond_to_error
from rag_demo.service.service import Service
from rag_demo.service.settings import Limits, Settings
from torch_utils import SafePyTorchCleanup
from torch_utils.fastapi import lifespan
from torch_utils.prometheus import register

log = logging.getLogger("rag_demo.service")
_NEW_CONNECTION_S = 3.0  # for the first request of a connection at shutdown
_CLOSING_S = 10.0
_TUNING = ("OMP_", "OPENBLAS_", "MKL_", "MALLOC_", "LD_PRELOAD", "PYTORCH_", "CUDA_")
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
        for lane in service.lanes.values():
            scope.manage(lane.host)
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
    app.include_router(probes.router)
    for module in (search_routes, document_routes):
        # The guard checks tokens, before it reads a body; this describes them.
        app.include_router(module.router, dependencies=[Security(BEARER)])
    app.add_middleware(Guard, settings=settings, limits=limits)
    return app


def bind(settings: Settings) -> socket.socket:
    """Open the listening socket.

    Raises:
        RagDemoError: The address is invalid or in use.
    """
    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise RagDemoError(
            f"cannot listen on {host}:{port}: {error}; choose another --port"
        ) from None
    # Accepted connections inherit the options. With Nagle's algorithm each response would wait
    # 40 ms for the acknowledgement of its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def run_server(
    settings: Settings,
    listener: socket.socket,
    *,
    limits: Limits = Limits(),  # noqa: B008  (it cannot be changed)
    load_model: LoadModel | None = None,
) -> int:
    """Serve until a signal, and answer every accepted request before returning.

    Call it in the main thread. Afterwards the signal is raised again, so that
    `torch_utils.exit_on_signals` ends the program. If a load or a call still runs then, the process
    ends at once.

    Args:
        settings: The service's settings.
        listener: The listening socket. It is closed at the end.
        limits: The service's limits.
        load_model: See `create_app`.

    Returns:
        The number of the signal if the program ignores it.

    Raises:
        Exception: The service could not start.
    """
    app = create_app(settings, limits=limits, load_model=load_model)
    server = Server(app, settings, limits)
    log.info("serving at %s port %d, process %d", *listener.getsockname()[:2], os.getpid())
    tuned = sorted(f"{name}={os.environ[name]}" for name in os.environ if name.startswith(_TUNING))
    log.info("environment: %s", " ".join(tuned) or "no variable for threads or memory is set")
    try:
        with listener:
            server.run([listener])
    finally:
        service = app.state.service
        if server.first_signal and service is not None and service.is_in_use:
            # Exit callbacks would wait for the model that the thread uses, and Python would crash
            # in the thread or hang.
            logging.shutdown()
            os._exit(128 + server.first_signal)
    if app.state.service.failure is not None:
        raise app.state.service.failure
    return server.first_signal


class Server(uvicorn.Server):
    """uvicorn's server, with a shutdown that waits for requests which are on their way.

    It uses two attributes of uvicorn's connections: ``cycle``, the current request, and
    ``transport``.
    """

    def __init__(self, app: FastAPI, settings: Settings, limits: Limits) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # Any client can send them.
            server_header=False,
            timeout_keep_alive=math.ceil(limits.idle_timeout_s),
            timeout_graceful_shutdown=math.ceil(settings.grace),
        )
        super().__init__(config)
        self._app = app

    @property
    def first_signal(self) -> int:
        """The number of the first signal to stop; 0 without a signal."""
        return next(iter(self._captured_signals), 0)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop; uvicorn asks ten times a second."""
        service = self._app.state.service
        has_failed = service.failure is not None and not service.is_in_use
        return await super().on_tick(counter) or has_failed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the accepted requests, then close everything."""
        log.info("stopping after %d more requests", len(self.server_state.tasks))
        self._app.state.service.draining = True
        ends = time.monotonic() + _NEW_CONNECTION_S
        # What has arrived but is not accepted is reset when the listener closes. asyncio takes
        # three turns of the loop to accept a connection.
        quiet_turns = 0
        while quiet_turns < 3 and time.monotonic() < ends:
            quiet_turns = 0 if select.select(sockets or (), (), (), 0)[0] else quiet_turns + 1
            await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        while self._has_new_connection() and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn would end the loop now, before everything is closed.
            await self.lifespan.shutdown()
        is_in_use = self._app.state.service.is_in_use
        log.info("stopped: %s", "a call or a load has not ended" if is_in_use else "all is closed")

    def _has_new_connection(self) -> bool:
        connections: Any = self.server_state.connections
        return any(each.cycle is None and not each.transport.is_closing() for each in connections)
