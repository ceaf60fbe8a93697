"""Connections with an end: the silent, the half-open and those that do not read are closed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import sys
import uuid
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rag_demo.service import metrics
from rag_demo.service.guard import HEADERS
from rag_demo.service.problems import Problem, body_of
from rag_demo.service.settings import Limits

__all__ = ["ACCEPTED_AT_ONCE", "protocol_for", "within_file_limit"]

log = logging.getLogger("rag_demo.service")
ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before the first of them is counted, at most."""
_OTHER_FILES = 256  # for these, those that are being closed, the index, and a model's process
_FEWEST = 4
_FIRST_S = 1.0  # for the request that a new connection was made for, when the service stops


def within_file_limit(limits: Limits) -> Limits:
    """Raise this process's limit of open files as far as it may be; have fewer connections if not.

    Where files run out, accepting fails, for those that ask as well as for the silent.
    """
    if sys.platform == "win32":
        return limits
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):  # Some systems have a lower limit of their own.
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
        soft = possible
    other = min(_OTHER_FILES, soft * 3 // 4)
    fewer = max(_FEWEST, min(limits.connections, soft - other))
    if fewer < limits.connections:
        log.warning("%d open files are allowed: at most %d connections at once", soft, fewer)
    return dataclasses.replace(limits, connections=fewer)


def protocol_for(limits: Limits) -> type[H11Protocol]:
    """Make uvicorn's protocol for HTTP/1.1 with limits that it has not.

    A connection without a request under way has so many seconds for the next one's whole head,
    however slowly it comes; where there are too many connections, the one that has been waited
    for the longest goes. One whose client does not read what it is sent is cut off.
    """
    waited_for: dict[PatientProtocol, None] = {}  # in the order in which the waiting began

    class Limited(PatientProtocol):
        _limits = limits
        _waited_for = waited_for

    return Limited


class _Parser(h11.Connection):
    """Takes a body in so many chunks, and no more: each costs the loop 40 us, however small."""

    def __init__(self, chunks: int) -> None:
        super().__init__(h11.SERVER)
        self._chunks = self._left = chunks

    def next_event(self) -> Any:
        """Return what comes next."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._left = self._chunks
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._left -= 1
            if self._left < 0:
                raise h11.RemoteProtocolError("a body in too many chunks")
        return event


class PatientProtocol(H11Protocol):
    """Waits for a client, but not for ever; see `protocol_for`."""

    _limits: Limits
    _waited_for: dict[PatientProtocol, None]
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _is_last = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Parser(self._limits.chunks)

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._mind_the_head()
        if len(self.connections) > self._limits.connections:
            next(iter(self._waited_for))._cut_off()

    def data_received(self, data: bytes) -> None:
        """Look whether a request has come."""
        super().data_received(data)
        if self._is_last and self.cycle is not None:
            self.cycle.keep_alive = False
        self._mind_the_head()

    def shutdown(self) -> None:
        """Answer what is under way, and the request that a new connection was made for."""
        self._is_last = True
        if self.cycle is None and not self.transport.is_closing():
            self.loop.call_later(_FIRST_S, self._end)
        else:
            self._end()

    def _end(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request as any other that is refused, and hang up."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # It is the rest of a request that has its answer already.
            return
        request_id = uuid.uuid4().hex
        problem = Problem(400, "this is no request of HTTP/1.1 that can be read")
        media_type, body = body_of(problem, "", request_id)
        headers = [
            (b"content-type", media_type.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (b"x-request-id", request_id.encode()),
            *HEADERS,
        ]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()
        log.info("request %s could not be read", request_id)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._mind_the_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        super().connection_lost(exc)
        self._stop_waiting()
        self.resume_writing()

    def pause_writing(self) -> None:
        """Give the client a time to read."""
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self._limits.send_s, self._cut_off)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _mind_the_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._limits.header_s, self._cut_off)
            self._waited_for[self] = None

    def _stop_waiting(self) -> None:
        self._waited_for.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cut_off(self) -> None:
        metrics.CONNECTIONS.inc()
        self._stop_waiting()
        self.transport.abort()
