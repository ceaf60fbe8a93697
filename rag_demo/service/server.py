"""The server: uvicorn with reloads by SIGHUP and a shutdown that loses no request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from rag_demo.errors import RagDemoError
from rag_demo.service import metrics
from rag_demo.service.app import create_app
from rag_demo.service.engine import LoadModel
from rag_demo.service.settings import Settings

log = logging.getLogger("rag_demo.service")
SERVES, ALIVE, RELOADED, RELOAD_OTHERS = "serves", "alive", "reloaded", "reload others"
"""Reports of a worker to its supervisor."""
Report = Callable[[str], None]
_BACKLOG = 2048  # connections that the system holds until they are accepted
_ACCEPTED_AT_ONCE = 64
_NEW_CONNECTION_S = 1.0  # for the first request of a connection at shutdown
_OTHER_FILES = 256  # for connections that are closing, the index and a model's process
_ALIVE_S = 1.0


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
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError, TypeError) as error:  # TypeError: the host is not a name.
        listener.close()
        raise RagDemoError(
            f"cannot listen on {settings.host}:{settings.port}: {error}; "
            "choose another --host or --port"
        ) from None
    listener.set_inheritable(True)
    return listener


def run_server(
    settings: Settings,
    listener: socket.socket,
    *,
    load_model: LoadModel | None = None,
    supervisor: socket.socket | None = None,
    report: Report = lambda line: None,
) -> int:
    """Serve until a signal, and answer every accepted request before returning.

    Call it in the main thread. Afterwards the signal is raised again, so that
    `torch_utils.exit_on_signals` ends the program.

    Args:
        settings: The service's settings.
        listener: The listening socket. It is closed at the end.
        load_model: See `rag_demo.service.app.create_app`.
        supervisor: A socket; when its other end closes, the server stops.
        report: Called with `SERVES`, `ALIVE` every second, `RELOADED` and `RELOAD_OTHERS`.

    Returns:
        The number of the signal if the program ignores it; 0 if the supervisor has ended.

    Raises:
        Exception: The service could not start.
    """
    app = create_app(settings, load_model=load_model)
    server = _Server(app, settings, supervisor, report)
    try:
        with listener:
            server.run([listener])
    except SystemExit as error:
        if server.started or error.code != 3:  # uvicorn's code for a startup that failed
            raise
    if server.started:
        return server.first_signal
    failure: Exception | None = getattr(app.state, "failure", None)
    raise failure or RagDemoError("the service could not start; the log says why")


def _allowed_connections(connections: int) -> int:
    """Raise the limit of open files for the connections; return how many are possible."""
    if sys.platform == "win32":
        return connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):  # Some systems have a lower limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    possible = min(connections, soft - min(_OTHER_FILES, soft // 2))
    if possible < connections:
        log.warning("the limit of %d open files allows %d connections", soft, possible)
    return possible


def supervisor_ended(supervisor: socket.socket) -> bool:
    """Return whether the other end of a worker's socket is closed."""
    try:
        return not supervisor.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


class _Server(uvicorn.Server):
    """A server that reloads on SIGHUP, drains, and closes idle connections.

    It uses two attributes of uvicorn's connections: ``cycle``, the current request, and
    ``transport``.
    """

    def __init__(
        self, app: FastAPI, settings: Settings, supervisor: socket.socket | None, report: Report
    ) -> None:
        self._connections = _allowed_connections(settings.limits.connections)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # Any client can send them.
            server_header=False,
            limit_concurrency=4 * self._connections,  # Idle connections are closed long before.
            timeout_keep_alive=math.ceil(settings.limits.header_s),
            backlog=max(1, min(_ACCEPTED_AT_ONCE, self._connections // 4)),
            timeout_graceful_shutdown=math.ceil(settings.limits.answer_s),
        )
        super().__init__(config)
        self._app, self._settings = app, settings
        self._supervisor, self._report = supervisor, report
        self._idle_since: dict[Any, float] = {}
        self._stops_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: Any = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the service and listen."""
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
        self._service.on_reload = lambda: self._report(RELOAD_OTHERS)
        if self._supervisor is not None:
            loop.add_reader(self._supervisor, self._check_supervisor, self._supervisor)
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._report(SERVES)
        self._alive = loop.create_task(self._report_alive())
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
            self._service.start(self._reload_and_report())

    async def _reload_and_report(self) -> None:
        await self._service.reload_on_signal()
        self._report(RELOADED)

    async def _report_alive(self) -> None:
        """Report every second, also while the last requests are answered."""
        while True:
            if not self._service.batcher.failure:
                self._report(ALIVE)
            await asyncio.sleep(_ALIVE_S)

    def _check_supervisor(self, supervisor: socket.socket) -> None:
        if supervisor_ended(supervisor) and self._loop is not None:
            self._loop.remove_reader(supervisor)
            self._begin_to_stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. A second signal ends draining; a second SIGINT aborts connections."""
        if self._captured_signals or self._settings.drain_s == 0:
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
            self._stops_at = time.monotonic() + self._settings.drain_s

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the accepted requests, then close everything."""
        log.info("stopping after %d more requests", len(self.server_state.tasks))
        for listener in sockets or ():
            await self._accept_waiting(listener)
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        ends = time.monotonic() + _NEW_CONNECTION_S
        while any(each.cycle is None for each in self._open()) and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        await super().shutdown()
        if self.force_exit:
            # uvicorn would end the loop now, before everything is closed.
            self._abort_connections()
            await self.lifespan.shutdown()

    async def _accept_waiting(self, listener: socket.socket) -> None:
        """Accept the connections in the backlog; closing the listener would reset them."""
        loop = asyncio.get_running_loop()
        protocol: Any = self.config.http_protocol_class
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        with contextlib.suppress(OSError):  # The backlog is empty.
            for _ in range(_BACKLOG):
                connection, _ = listener.accept()
                connection.setblocking(False)
                await loop.connect_accepted_socket(
                    lambda: protocol(config=self.config, **state), connection
                )

    def _open(self) -> list[Any]:
        found: list[Any] = list(self.server_state.connections)
        return [each for each in found if not each.transport.is_closing()]

    async def on_tick(self, counter: int) -> bool:
        """Close idle connections, and stop after draining. uvicorn calls it ten times a second."""
        self._close_idle()
        if self._stops_at is not None and time.monotonic() >= self._stops_at:
            self.should_exit = True
        return await super().on_tick(counter)

    def _close_idle(self) -> None:
        """Close connections that are idle for ``header_s``, and the oldest ones above the limit."""
        now, connections = time.monotonic(), self._open()
        idle = [each for each in connections if each.cycle is None or each.cycle.response_complete]
        # The key has the request: a connection may have answered another one between two ticks.
        keys = [(each, each.cycle) for each in idle]
        self._idle_since = {key: self._idle_since.get(key, now) for key in keys}
        excess = len(connections) - self._connections
        for place, key in enumerate(sorted(keys, key=self._idle_since.__getitem__)):
            if place < excess or now - self._idle_since[key] > self._settings.limits.header_s:
                metrics.IDLE_CLOSED.inc()
                key[0].transport.abort()
