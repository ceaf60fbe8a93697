"""The server: uvicorn with reloads by SIGHUP and a shutdown that loses no request."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import os
import select
import signal
import socket
import time
from functools import partial
from types import FrameType
from typing import Any

import prometheus_client
import uvicorn
from fastapi import FastAPI

from rag_demo.errors import RagDemoError
from rag_demo.service.app import create_app
from rag_demo.service.engine import LoadModel
from rag_demo.service.settings import Settings

log = logging.getLogger("rag_demo.service")
_NEW_CONNECTION_S = 3.0  # for the first request of a connection at shutdown


def bind(settings: Settings) -> socket.socket:
    """Open the listening socket.

    Raises:
        RagDemoError: The address is invalid or in use.
    """
    address = settings.host, settings.port
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server(address, family=family, reuse_port=settings.reuse_port)
    except OSError as error:
        raise _cannot_listen(*address, error, "--port") from None
    # Accepted connections inherit the options. With Nagle's algorithm each response would wait
    # 40 ms for the acknowledgement of its head.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: ends connections that nobody reads.
        timeout_ms = math.ceil(1000 * settings.write_timeout)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    return listener


def _cannot_listen(host: str, port: int, error: OSError, option: str) -> RagDemoError:
    return RagDemoError(f"cannot listen on {host}:{port}: {error}; choose another {option}")


def _serve_metrics(host: str, port: int, stack: contextlib.ExitStack) -> None:
    """Serve the metrics on a port of their own, until the stack closes."""
    try:
        server, thread = prometheus_client.start_http_server(port, host)
    except OSError as error:
        raise _cannot_listen(host, port, error, "--metrics-port") from None
    for close in (thread.join, server.server_close, server.shutdown):
        stack.callback(close)
    log.info("metrics at http://%s:%d/metrics", host, server.server_port)


def run_server(
    settings: Settings, listener: socket.socket, *, load_model: LoadModel | None = None
) -> int:
    """Serve until a signal, and answer every accepted request before returning.

    Call it in the main thread. Afterwards the signal is raised again, so that
    `torch_utils.exit_on_signals` ends the program.

    Args:
        settings: The service's settings.
        listener: The listening socket. It is closed at the end.
        load_model: See `rag_demo.service.app.create_app`.

    Returns:
        The number of the signal if the program ignores it.

    Raises:
        Exception: The service could not start.
    """
    app = create_app(settings, load_model=load_model)
    server = Server(app, settings)
    with listener, contextlib.ExitStack() as stack:
        if settings.metrics_port is not None:
            _serve_metrics(settings.metrics_host, settings.metrics_port, stack)
        try:
            server.run([listener])
        finally:
            service = app.state.service
            is_left = service is not None and not service.has_ended
            if server.first_signal and is_left and settings.isolation == "thread":
                # A thread that loads or computes would hang or crash while Python ends.
                atexit._run_exitfuncs()
                os._exit(128 + server.first_signal)
    if app.state.service.failure is not None:
        raise app.state.service.failure
    return server.first_signal


class Server(uvicorn.Server):
    """A server that reloads on SIGHUP and drains.

    It uses two attributes of uvicorn's connections: ``cycle``, the current request, and
    ``transport``.
    """

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # Any client can send them.
            server_header=False,
            timeout_keep_alive=math.ceil(settings.idle_timeout),
            timeout_graceful_shutdown=math.ceil(settings.grace),
        )
        super().__init__(config)
        self._app, self._settings = app, settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the index and listen; the models are loaded afterwards."""
        await super().startup(sockets)
        self._app.state.service.on_failure = self._begin_to_stop
        if hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)
        for listener in sockets or ():
            log.info("serving at %s port %d, process %d", *listener.getsockname()[:2], os.getpid())

    @property
    def first_signal(self) -> int:
        """The number of the first signal to stop; 0 without a signal."""
        return next(iter(self._captured_signals), 0)

    def _reload(self) -> None:
        service = self._app.state.service
        if not service.draining:
            service.start(service.reload_on_signal())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. A second signal ends draining; a second SIGINT aborts connections."""
        if self._captured_signals or self._settings.drain == 0:
            super().handle_exit(sig, frame)
        else:
            self._captured_signals.append(sig)
        self._begin_to_stop()
        if self.force_exit:
            asyncio.get_running_loop().call_soon_threadsafe(self._abort_connections)

    def _begin_to_stop(self) -> None:
        if self._app.state.service is not None:
            self._app.state.service.draining = True
        loop, stop = asyncio.get_running_loop(), partial(setattr, self, "should_exit", True)
        loop.call_soon_threadsafe(loop.call_later, self._settings.drain, stop)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the accepted requests, then close everything."""
        log.info("stopping after %d more requests", len(self.server_state.tasks))
        for lane in self._app.state.service.lanes.values():
            lane.stop_loading()
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
        self._abort_connections()  # Of clients that do not read.
        if self.force_exit:
            # uvicorn would end the loop now, before everything is closed.
            await self.lifespan.shutdown()

    def _has_new_connection(self) -> bool:
        connections: Any = self.server_state.connections
        return any(each.cycle is None and not each.transport.is_closing() for each in connections)
