"""Middleware that every request passes before its route.

It assigns request ids, checks host names and tokens, and reads bodies under limits of size and
time. It adds security headers, cuts off clients that do not read, and logs each request.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.routing import Match

from rag_demo.service import metrics
from rag_demo.service.logs import REQUEST_ID
from rag_demo.service.probes import PAGE_FILES
from rag_demo.service.problems import ClientGoneError, Problem, overloaded, problem_response
from rag_demo.service.responses import BEARER, Buffer
from rag_demo.service.settings import Settings, is_loopback

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = dict[bytes, bytes]

log = logging.getLogger("rag_demo.service")
STREAMED = "/documents/bulk"

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?")
_OPEN_PATHS = {"/livez", "/readyz", "/health", *PAGE_FILES}
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}
_FORWARDED = re.compile(rb"forwarded|x-forwarded-.*|x-real-ip|via")
_CLIENT_GONE = 499  # nginx's status for a client that closed its connection
_PIECE = 1 << 16  # bytes of a response that are sent together
_CLOSE = {"connection": "close"}
_SECURITY_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]


class Guard:
    """Admit requests or refuse them.

    Args:
        app: The application behind the guard.
        settings: The service's settings.
        routes: The routes behind the guard.
    """

    def __init__(self, app: Any, settings: Settings, routes: Sequence[Any]) -> None:
        self._app, self._settings, self._routes = app, settings, routes
        self._on_loopback = is_loopback(settings.host)
        self._buffer = Buffer(settings.buffer_bytes)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Headers = dict(reversed(scope["headers"]))  # The first of several counts.
        client_id = headers.get(b"x-request-id", b"")
        request_id = client_id.decode() if _ID.fullmatch(client_id) else uuid.uuid4().hex
        REQUEST_ID.set(request_id)
        account = [0]
        # The server omits the body of a response to HEAD.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        take_bytes = partial(self._buffer.take, account)
        request = {**scope, "method": method, "request_id": request_id, "take_bytes": take_bytes}
        service = scope["state"]["service"]
        status = _CLIENT_GONE
        started = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", request_id.encode()), *_SECURITY_HEADERS]
                if service.draining:
                    added.append((b"connection", b"close"))
                known = {name for name, _ in message["headers"]}
                added = [each for each in added if each[0] not in known]
                message = {**message, "headers": [*message["headers"], *added]}
            await self._send(send, message)

        async def refuse(problem: Problem) -> None:
            if status == _CLIENT_GONE:  # Otherwise a response has begun.
                response = problem_response(problem, request["path"], request_id)
                await response(scope, receive, send_with_headers)

        metrics.IN_FLIGHT.inc()
        try:
            try:
                await self._admit(request, headers, service.tokens)
                if request["path"] == STREAMED:
                    receive = partial(_receive_within, receive, self._settings.body_timeout)
                else:
                    receive = _replay(await self._read(request, headers, receive), receive)
                await self._app(request, receive, send_with_headers)
            except Problem as problem:
                await refuse(problem)
            except ClientGoneError:
                pass
            except asyncio.CancelledError:  # The server does not wait any longer.
                await refuse(overloaded(1, "the service is stopping", status=503))
            except Exception as error:
                # The last handler before the server: the text of an unknown error is for the
                # log only.
                log.error("the request failed: %r", error, exc_info=error)
                await refuse(Problem(500, "the service failed; its log says why"))
        except ClientGoneError:  # The client does not read the refusal.
            pass
        finally:
            metrics.IN_FLIGHT.dec()
            self._buffer.used -= account[0]
            seconds = time.perf_counter() - started
            route = self._route(request)
            # Labels that clients can invent would be kept forever.
            method = scope["method"] if scope["method"] in _METHODS else "other"
            metrics.REQUESTS.labels(route, method, str(status)).inc()
            metrics.SECONDS.labels(route).observe(seconds)
            client = (scope.get("client") or ("unknown",))[0]
            extra = {"client": client, "method": method, "route": route, "status": status}
            line = (client, method, route, status, seconds * 1e3)
            log.info("%s %s %s %s %.1f ms", *line, extra={**extra, "ms": round(seconds * 1e3, 1)})

    def _route(self, scope: Message) -> str:
        """Return the route of a request, also if it was refused before its route was known."""
        matching = (each.path for each in self._routes if each.matches(scope)[0] != Match.NONE)
        return getattr(scope.get("route"), "path", None) or next(matching, "unknown")

    async def _send(self, send: Send, message: Message) -> None:
        """Send a part of a response in pieces.

        Raises:
            ClientGoneError: The client does not read; the server closes the connection.
        """
        body = message.get("body", b"")
        for start in range(0, max(1, len(body)), _PIECE):
            piece = message
            if body:
                more = message.get("more_body", False) or start + _PIECE < len(body)
                piece = {**message, "body": body[start : start + _PIECE], "more_body": more}
            try:
                await asyncio.wait_for(send(piece), self._settings.write_timeout)
            except asyncio.TimeoutError:
                raise ClientGoneError from None

    async def _admit(self, scope: Message, headers: Headers, tokens: Any) -> None:
        path, method = scope["path"], scope["method"]
        host = headers.get(b"host", b"").decode("latin-1")
        # Browsers always send a Host header; HTTP/1.0 clients may not.
        if b"host" in headers and not _HOST.fullmatch(host):
            raise Problem(400, "the Host header is not a host name with an optional port")
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Two lengths allow request smuggling (RFC 9112, 6.1).
            detail = "send either content-length or transfer-encoding, not both"
            raise Problem(400, detail, headers=_CLOSE)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            detail = "compressed bodies are not supported; send the body without content-encoding"
            raise Problem(415, detail, headers={"accept-encoding": "identity", **_CLOSE})
        is_admin = path.startswith("/admin") or (path.startswith("/documents") and method != "GET")
        if not is_admin and method == "GET" and path in _OPEN_PATHS and tokens.clients:
            return
        if is_admin and tokens.clients and not tokens.admin:
            raise Problem(403, "administration needs an admin token; set RAG_DEMO_ADMIN_TOKEN")
        known = [*tokens.admin, *(() if is_admin else tokens.clients)]
        if tokens.admin if is_admin else tokens.clients:
            credentials = await BEARER(Request(scope))
            token = credentials.credentials.encode() if credentials else b""
            if is_admin and token in tokens.clients:
                raise Problem(403, "this token is a client's; send the admin token")
            if not sum(hmac.compare_digest(token, each) for each in known):
                raise Problem(
                    401,
                    "a valid token is required; send Authorization: Bearer TOKEN",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            return
        if is_admin:
            self._admit_local(scope, headers)
        name = re.sub(r":\d+$", "", host)
        if (self._on_loopback or is_admin) and b"host" in headers and not is_loopback(name):
            # A site whose name resolves to this machine could read everything (DNS rebinding).
            what = "administration" if is_admin else "this service"
            raise Problem(421, f"{what} is not available under this host name; use localhost")

    def _admit_local(self, scope: Message, headers: Headers) -> None:
        client = (scope.get("client") or (None,))[0]
        if not is_loopback(client) or any(map(_FORWARDED.fullmatch, headers)):
            raise Problem(403, "administration needs a token, or a client on the same machine")
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        is_foreign = headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        if is_foreign or (origin is not None and origin.partition(b"://")[2] != host):
            raise Problem(403, "pages of other sites must not administer this service")

    async def _read(self, scope: Message, headers: Headers, receive: Receive) -> bytes:
        """Read the whole body; the route starts only when the body is complete."""
        if scope["method"] in ("GET", "OPTIONS"):
            return b""
        most = self._settings.max_body_bytes
        too_large = Problem(413, f"the body has more than {most:,} bytes", headers=_CLOSE)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > most:
            raise too_large
        body = bytearray()

        async def read() -> None:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                scope["take_bytes"](len(part))
                body.extend(part)
                if len(body) > most:
                    raise too_large
                if not message.get("more_body", False):
                    return

        try:
            await asyncio.wait_for(read(), self._settings.body_timeout)
        except asyncio.TimeoutError:
            detail = f"the body was not complete within {self._settings.body_timeout:g} s"
            raise Problem(408, detail, headers=_CLOSE) from None
        return bytes(body)


async def _receive_within(receive: Receive, timeout_s: float) -> Message:
    try:
        return await asyncio.wait_for(receive(), timeout_s)
    except asyncio.TimeoutError:
        raise Problem(408, f"no part of the body came within {timeout_s:g} s") from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that returns the body first and then the server's messages."""
    parts = [body]

    async def replay() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    return replay
