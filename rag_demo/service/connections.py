"""Connections with an end: the silent, the half-open and those that do not read are closed."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from rag_demo.service import metrics
from rag_demo.service.settings import Limits

__all__ = ["protocol_for"]


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


class PatientProtocol(H11Protocol):
    """Waits for a client, but not for ever; see `protocol_for`."""

    _limits: Limits
    _waited_for: dict[PatientProtocol, None]
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._mind_the_head()
        if len(self.connections) > self._limits.connections:
            next(iter(self._waited_for))._cut_off()

    def data_received(self, data: bytes) -> None:
        """Look whether a request has come."""
        super().data_received(data)
        self._mind_the_head()

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
