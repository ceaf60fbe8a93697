"""The server: uvicorn with a listener, reloads by SIGHUP, and an end that loses no request."""

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

from rag_demo.errors import RagDemoError
from rag_demo.service import metrics
from rag_demo.service.app import create_app
from rag_demo.service.engine import LoadModel
from rag_demo.service.settings import Settings

__all__ = ["ALIVE", "RELOADED", "RELOAD_OTHERS", "SERVES", "Report", "bind", "run_server"]

log = logging.getLogger("rag_demo.service")
SERVES, ALIVE, RELOADED, RELOAD_OTHERS = "serves", "alive", "reloaded", "reload others"
"""What a worker reports to its supervisor."""
Report = Callable[[str], None]
_BACKLOG = 2048  # connections that the system holds until they are accepted
_ACCEPTED_AT_ONCE = 64
_NEW_CONNECTION_S = 1.0  # for the first request of a connection made before the end
_OTHER_FILES = 256  # for connections being closed, the index and a model's process
_ALIVE_S = 1.0


def bind(settings: Settings) -> socket.socket:
    """Open the listening socket.

    Raises:
        RagDemoError: The address is invalid or taken.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name TCP. With it each answer
    # waits 40 ms for the acknowledgement of its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError, TypeError) as error:  # TypeError: not a name at all
        listener.close()
        raise RagDemoError(
            f"{settings.host}:{settings.port} cannot be listened on: {error}; "
            "name another --host or --port"
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
    """Serve until a signal; answer every accepted request before the end. For the main thread.

    Afterwards the signal is raised again: `torch_utils.exit_on_signals` makes it an orderly exit.

    Args:
        settings: The service's.
        listener: The listening socket; closed at the end.
        load_model: See `rag_demo.service.app.create_app`.
        supervisor: A socket whose end of file says that all workers stop.
        report: Called with `SERVES`, `ALIVE` every second, `RELOADED` and `RELOAD_OTHERS`.

    Returns:
        The number of the signal, if the program ignores it; 0 if the supervisor ended.

    Raises:
        Exception: It could not start.
    """
    app = create_app(settings, load_model=load_model)
    connections = _allowed_connections(settings.limits.connections)
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # Anybody can send them.
        server_header=False,
        limit_concurrency=4 * connections,  # Idle ones are closed long before.
        timeout_keep_alive=math.ceil(settings.limits.header_s),
        backlog=max(1, min(_ACCEPTED_AT_ONCE, connections // 4)),
        timeout_graceful_shutdown=math.ceil(settings.limits.answer_s),
    )
    server = _Server(config, settings, connections, supervisor, report)
    try:
        with listener:
            server.run([listener])
    except SystemExit as error:
        if server.started or error.code != 3:  # uvicorn's code for a start that failed
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
    wanted = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):  # Some systems have a lower limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    fewer = max(4, min(connections, soft - min(_OTHER_FILES, soft * 3 // 4)))
    if fewer < connections:
        log.warning("%d open files are allowed: at most %d connections at once", soft, fewer)
    return fewer


class _Server(uvicorn.Server):
    """Reloads on SIGHUP, drains, and closes idle connections.

    Of uvicorn's connections it uses ``cycle``, the request under way, and ``transport``.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        settings: Settings,
        connections: int,
        supervisor: socket.socket | None,
        report: Report,
    ) -> None:
        super().__init__(config)
        self._settings, self._connections = settings, connections
        self._supervisor, self._report = supervisor, report
        self._idle_since: dict[Any, float] = {}
        self._stops_at: float | None = None
        self._reload_early = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the service and listen."""
        self._loop = loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        # `run_server` raises what fails here; uvicorn would print its traceback too.
        lifespan: Any = self.lifespan
        lifespan.logger, logger = logging.Logger("silent", logging.CRITICAL), lifespan.logger
        await super().startup(sockets)
        lifespan.logger = logger
        if not self.started:
            return
        if self._supervisor is not None:
            loop.add_reader(self._supervisor, self._check_supervisor)
        self._service.on_reload = lambda: self._report(RELOAD_OTHERS)
        self._report(SERVES)
        self._alive = loop.create_task(self._report_alive())
        if self._reload_early:
            self._reload()
        for listener in sockets or ():
            listener.listen(_BACKLOG)
            host, port = listener.getsockname()[:2]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            log.info("serving at http://%s, process %d", address, os.getpid())

    @property
    def first_signal(self) -> int:
        """The number of the first signal to stop; 0 without one."""
        return next(iter(self._captured_signals), 0)

    @property
    def _service(self) -> Any:
        return getattr(self.config.app.state, "service", None)  # type: ignore[union-attr]

    def _reload(self) -> None:
        service = self._service
        self._reload_early = service is None
        if service is not None and not service.draining:
            service.start(self._reload_and_report())

    async def _report_alive(self) -> None:
        """Report every second, also while the last requests are answered."""
        while True:
            if not self._service.batcher.failure:
                self._report(ALIVE)
            await asyncio.sleep(_ALIVE_S)

    async def _reload_and_report(self) -> None:
        await self._service.reload_on_signal()
        self._report(RELOADED)

    def _check_supervisor(self) -> None:
        """Stop when the supervisor says so or has ended."""
        assert self._supervisor is not None and self._loop is not None
        with contextlib.suppress(BlockingIOError):
            if not _received(self._supervisor):
                self._loop.remove_reader(self._supervisor)
                self._begin_to_stop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop. A second signal ends draining; a second SIGINT cuts connections off."""
        if self._captured_signals or self._settings.drain_s == 0:
            super().handle_exit(sig, frame)
        else:
            self._captured_signals.append(sig)
        self._begin_to_stop()
        if self.force_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut_off)

    def _begin_to_stop(self) -> None:
        if self._service is not None:
            self._service.draining = True
        if self._stops_at is None:
            self._stops_at = time.monotonic() + self._settings.drain_s

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what was accepted, then close everything."""
        log.info("stopping: %d requests are answered first", len(self.server_state.tasks))
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
            # uvicorn would end the loop now, in the middle of closing.
            self._cut_off()
            await self.lifespan.shutdown()

    async def _accept_waiting(self, listener: socket.socket) -> None:
        """Accept the connections in the backlog, which closing the listener would reset."""
        loop = asyncio.get_running_loop()
        protocol: Any = self.config.http_protocol_class
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        with contextlib.suppress(OSError):  # No more connections.
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
        """Close idle connections, and stop when draining is over; ten times a second."""
        self._close_idle()
        if self._stops_at is not None and time.monotonic() >= self._stops_at:
            self.should_exit = True
        return await super().on_tick(counter)

    def _close_idle(self) -> None:
        """Close connections without a request: after ``header_s``, or if there are too many."""
        now, connections = time.monotonic(), self._open()
        idle = [each for each in connections if each.cycle is None or each.cycle.response_complete]
        # With the request, or a connection that is busy between two ticks would seem idle.
        keys = [(each, each.cycle) for each in idle]
        self._idle_since = {key: self._idle_since.get(key, now) for key in keys}
        excess = len(connections) - self._connections
        for place, key in enumerate(sorted(keys, key=self._idle_since.__getitem__)):
            if place < excess or now - self._idle_since[key] > self._settings.limits.header_s:
                metrics.IDLE_CLOSED.inc()
                key[0].transport.abort()


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        raise
    except OSError:  # The other end is gone.
        return b""
