"""The server: uvicorn, with the signals and the limits of a service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import time
from types import FrameType
from typing import Any

import uvicorn

from rag_demo.errors import RagDemoError
from rag_demo.service.app import create_app
from rag_demo.service.connections import ACCEPTED_AT_ONCE, protocol_for, within_file_limit
from rag_demo.service.listener import WAITING, refuse_newcomers
from rag_demo.service.opened import LoadModel
from rag_demo.service.running import SERVES, Tell, tell_nobody
from rag_demo.service.settings import Settings

__all__ = ["run_server"]

log = logging.getLogger("rag_demo.service")
_KEEP_ALIVE_S = 15
_HANDSHAKE_S = 0.1  # for connections that are half made when newcomers are refused


def run_server(
    settings: Settings,
    listener: socket.socket,
    *,
    load_model: LoadModel | None = None,
    watched: socket.socket | None = None,
    tell: Tell = tell_nobody,
) -> int:
    """Serve until a signal says to stop; every request that was let in is answered before.

    To be called in the main thread. Afterwards the signal takes the way that it would have
    taken: have `torch_utils.exit_on_signals` make it an orderly exit.

    Args:
        settings: The service's.
        listener: What is listened on; closed at the end.
        load_model: See `rag_demo.service.app.create_app`.
        watched: A line to who started this and others that share the listener; its end, however
            it came, says that all of them stop.
        tell: Is called with `SERVES`, and with `RELOADED` (see `rag_demo.service.running`).

    Returns:
        The number of the signal that said so, where this program ignores it, as what a script
        starts by ``&`` ignores SIGINT; 0 where it was the line.

    Raises:
        Exception: It could not start; whatever opening the index or the model raised.
    """
    app = create_app(settings, load_model=load_model)
    limits = within_file_limit(settings.limits)
    config = uvicorn.Config(
        app,
        http=protocol_for(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # Whoever says to be somebody else is not believed.
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        # asyncio accepts as many at once, four times before it has closed one that is too many.
        backlog=max(1, min(ACCEPTED_AT_ONCE, limits.connections // 4)),
        timeout_graceful_shutdown=math.ceil(settings.limits.answer_s),
    )
    server = _Server(config, settings.drain_s, watched, tell)
    try:
        with listener:  # Which uvicorn closes only if it had begun.
            server.run([listener])
    except SystemExit as error:
        if server.started or error.code != 3:  # newer uvicorn's number for a start that failed
            raise
    if server.started:
        return server.stopped_by
    failure: Exception | None = getattr(app.state, "failure", None)
    if failure is None:
        raise RagDemoError("the service could not start; the log says why")
    raise failure


class _Server(uvicorn.Server):
    """Reloads on SIGHUP; says that it stops before it does."""

    def __init__(
        self, config: uvicorn.Config, drain_s: float, watched: socket.socket | None, tell: Tell
    ) -> None:
        super().__init__(config)
        self._drain_s, self._watched, self._tell = drain_s, watched, tell
        self._stops_at: float | None = None
        self._will_reload = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        self._loop = loop = asyncio.get_running_loop()
        if hasattr(signal, "SIGHUP"):
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        # What cannot be opened is raised by `run_server`: no other has to print its traceback.
        lifespan: Any = self.lifespan
        lifespan.logger, said_by = logging.Logger("silent", logging.CRITICAL), lifespan.logger
        await super().startup(sockets)
        lifespan.logger = said_by
        if not self.started:
            return
        if self._watched is not None:
            loop.add_reader(self._watched, self._on_end, loop)
        self._running().tell = self._tell
        self._tell(SERVES)
        if self._will_reload:
            self._reload()
        for listener in sockets or ():
            listener.listen(WAITING)
            host, port = listener.getsockname()[:2]
            where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            log.info("serving at http://%s, process %d", where, os.getpid())

    @property
    def stopped_by(self) -> int:
        """The number of the first signal that said so."""
        return next(iter(self._captured_signals), 0)

    def _running(self) -> Any:
        return getattr(self.config.app.state, "running", None)  # type: ignore[union-attr]

    def _reload(self) -> None:
        running = self._running()
        self._will_reload = running is None  # It has been told before it was ready.
        if running is not None and not running.draining:
            running.start(running.reload_quietly())

    def _on_end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Stop: who started this says so, or has ended, however that came."""
        assert self._watched is not None
        if self._all_stop():
            loop.remove_reader(self._watched)
            self._begin_to_stop()

    def _all_stop(self) -> bool:
        """Return whether nobody is left who would serve those whom this one does not accept."""
        try:
            return self._watched is None or not self._watched.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # It ended without having listened.
            return True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; a second signal does not wait for what is being drained."""
        if self._captured_signals or self._drain_s == 0:
            super().handle_exit(sig, frame)
        else:
            self._captured_signals.append(sig)
        self._begin_to_stop()
        if self.force_exit and self._loop is not None:
            # From Python 3.12 on uvicorn waits for its connections even then.
            self._loop.call_soon_threadsafe(self._cut_off)

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _begin_to_stop(self) -> None:
        running = self._running()
        if running is not None:
            running.draining = True
        if self._stops_at is None:
            self._stops_at = time.monotonic() + self._drain_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer, then give everything back; after a second Ctrl-C without the answers."""
        log.info("stopping: %d requests are answered first", len(self.server_state.tasks))
        for listener in sockets or ():
            if self._all_stop():
                refuse_newcomers(listener)
                await asyncio.sleep(_HANDSHAKE_S)
            await self._accept_waiting(listener)
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn would end its loop now, and with it the closing, in the middle.
            self._cut_off()
            await self.lifespan.shutdown()

    async def _accept_waiting(self, listener: socket.socket) -> None:
        """Take whom the system has let in already: closing the listener would cut them off."""
        loop = asyncio.get_running_loop()
        protocol: Any = self.config.http_protocol_class
        state = {"server_state": self.server_state, "app_state": self.lifespan.state}
        with contextlib.suppress(OSError):  # Nobody waits any more.
            for _ in range(WAITING):
                connection, _ = listener.accept()
                connection.setblocking(False)
                await loop.connect_accepted_socket(
                    lambda: protocol(config=self.config, **state), connection
                )

    async def on_tick(self, counter: int) -> bool:
        """Stop when the time to drain is over."""
        if self._stops_at is not None and time.monotonic() >= self._stops_at:
            self.should_exit = True
        return await super().on_tick(counter)
