"""The server: uvicorn, which loses no request when it stops and waits for no hung call."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import socket
import time
from typing import Any

import uvicorn
from fastapi import FastAPI

from rag_demo.errors import RagDemoError
from rag_demo.service.app import create_app
from rag_demo.service.engine import LoadModel
from rag_demo.service.settings import Limits, Settings

log = logging.getLogger("rag_demo.service")
_NEW_CONNECTION_S = 3.0  # for the first request of a connection at shutdown


def bind(settings: Settings, limits: Limits = Limits()) -> socket.socket:  # noqa: B008
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
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: ends connections that nobody reads.
        timeout_ms = math.ceil(1000 * limits.write_timeout_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
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
        load_model: See `rag_demo.service.app.create_app`.

    Returns:
        The number of the signal if the program ignores it.

    Raises:
        Exception: The service could not start.
    """
    app = create_app(settings, limits=limits, load_model=load_model)
    server = Server(app, settings, limits)
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the index and listen; the models are loaded afterwards."""
        await super().startup(sockets)
        self._app.state.service.on_failure = self._stop
        for listener in sockets or ():
            log.info("serving at %s port %d, process %d", *listener.getsockname()[:2], os.getpid())

    def _stop(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the accepted requests, then close everything."""
        log.info("stopping after %d more requests", len(self.server_state.tasks))
        self._app.state.service.begin_to_stop()
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
