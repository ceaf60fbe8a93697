"""The server: uvicorn with reloads by SIGHUP and a shutdown that loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from rag_demo.errors import RagDemoError
from rag_demo.service.app import create_app
from rag_demo.service.engine import LoadModel
from rag_demo.service.settings import Settings

log = logging.getLogger("rag_demo.service")
_BACKLOG = 2048  # connections that the system holds until they are accepted
_REFUSE_S = 0.1
_NEW_CONNECTION_S = 3.0  # for the first request of a connection at shutdown


def bind(settings: Settings) -> socket.socket:
    """Open the listening socket.

    Raises:
        RagDemoError: The address is invalid or in use.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name TCP. With it each response
    # waits 40 ms for the acknowledgement of its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Also ends connections that nobody reads.
            timeout_ms = math.ceil(1000 * settings.write_timeout)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError, TypeError) as error:  # TypeError: the host is not a name.
        listener.close()
        raise _cannot_listen(settings.host, settings.port, error, "--port") from None
    return listener


def _cannot_listen(host: str, port: int, error: Exception, option: str) -> RagDemoError:
    return RagDemoError(
        f"cannot listen on {host}:{port}: {error}; choose another address or {option}"
    )


@contextlib.contextmanager
def _metrics_served(settings: Settings) -> Iterator[None]:
    """Serve the metrics on a port of their own, if the settings name one."""
    if settings.metrics_port is None:
        yield
        return
    import prometheus_client

    host, port = settings.metrics_host, settings.metrics_port
    try:
        server, thread = prometheus_client.start_http_server(port, host)
    except OSError as error:
        raise _cannot_listen(host, port, error, "--metrics-port") from None
    log.info("metrics at http://%s:%d/metrics", host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
    try:
        with listener, _metrics_served(settings):
            server.run([listener])
    except SystemExit as error:
        if server.started or error.code != 3:  # uvicorn's code for a startup that failed
            raise
    service = getattr(app.state, "service", None)
    failure: Exception | None = getattr(app.state, "failure", None) or (service and service.failure)
    if failure is not None or not server.started:
        raise failure or RagDemoError("the service could not start; the log says why")
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
            limit_concurrency=settings.max_connections,
            timeout_keep_alive=math.ceil(settings.idle_timeout),
            timeout_graceful_shutdown=math.ceil(settings.grace),
        )
        super().__init__(config)
        self._app, self._settings = app, settings
        self._stops_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: Any = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the index and listen; the models are loaded afterwards."""
        self._loop = loop = asyncio.get_running_loop()
        # `run_server` raises the error of a startup that fails; uvicorn would log it as well.
        errors = logging.getLogger("uvicorn.error")
        errors.disabled = True
        try:
            await super().startup(sockets)
        finally:
            errors.disabled = False
        if not self.started:
            return
        self._service = self._app.state.service
        self._service.on_failure = self._begin_to_stop
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
            host, port = listener.getsockname()[:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            log.info("serving at http://%s, process %d", address, os.getpid())

    @property
    def first_signal(self) -> int:
        """The number of the first signal to stop; 0 without a signal."""
        return next(iter(self._captured_signals), 0)

    def _reload(self) -> None:
        if not self._service.draining:
            self._service.start(self._service.reload_on_signal())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. A second signal ends draining; a second SIGINT aborts connections."""
        if self._captured_signals or self._settings.drain == 0:
            super().handle_exit(sig, frame)
        else:
            self._captured_signals.append(sig)
        self._begin_to_stop()
        if self.force_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._abort_connections)

    def _begin_to_stop(self) -> None:
        if self._service is not None:
            self._service.draining = True
        if self._stops_at is None:
            self._stops_at = time.monotonic() + self._settings.drain

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the accepted requests, then close everything."""
        log.info("stopping after %d more requests", len(self.server_state.tasks))
        self._service.start(self._refuse_waiting_for_load())
        ends = time.monotonic() + _NEW_CONNECTION_S
        # What has arrived but is not accepted is reset when the listener closes. asyncio takes
        # three turns of the loop to accept a connection.
        quiet_turns = 0
        with selectors.DefaultSelector() as backlog:
            for listener in sockets or ():
                backlog.register(listener, selectors.EVENT_READ)
            while (quiet_turns := 0 if backlog.select(0) else quiet_turns + 1) < 3:
                if time.monotonic() >= ends:
                    break
                await asyncio.sleep(0)
        for server in self.servers:
            server.close()
        while any(each.cycle is None for each in self._open()) and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)
        self._abort_connections()  # Of clients that do not read.
        if self.force_exit:
            # uvicorn would end the loop now, before everything is closed.
            await self.lifespan.shutdown()

    async def _refuse_waiting_for_load(self) -> None:
        """Refuse requests that wait for a model, until the service closes; a load may hang."""
        while True:
            self._service.refuse_waiting_for_load()
            await asyncio.sleep(_REFUSE_S)

    def _open(self) -> list[Any]:
        found: list[Any] = list(self.server_state.connections)
        return [each for each in found if not each.transport.is_closing()]

    async def on_tick(self, counter: int) -> bool:
        """Stop after draining. uvicorn calls it ten times a second."""
        if self._stops_at is not None and time.monotonic() >= self._stops_at:
            self.should_exit = True
        return await super().on_tick(counter)
