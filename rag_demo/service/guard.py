"""Middleware that every request passes before its route.

It assigns request ids, checks tokens and host names, and reads bodies under limits of size and
time. It adds security headers and logs each request.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rag_demo.service import metrics
from rag_demo.service.problems import ClientGoneError, Problem, overloaded, problem_response
from rag_demo.service.settings import Settings, is_loopback

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = dict[bytes, bytes]

log = logging.getLogger("rag_demo.service")
REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("rag_demo_request_id", default="")

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_OPEN_PATHS = {"/livez", "/readyz", "/health", "/", "/page.css", "/page.js"}
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}
_FORWARDED = re.compile(rb"forwarded|x-forwarded-.*|x-real-ip|via")
_CLIENT_GONE = 499  # nginx's status for a client that closed its connection
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
    """

    def __init__(self, app: Any, settings: Settings) -> None:
        self._app = app
        self._limits = settings.limits
        self._token = settings.token and settings.token.encode()
        self._admin_token = (settings.admin_token or settings.token or "").encode()
        self._on_loopback = is_loopback(settings.host)
        self._body_bytes = 0  # of all requests

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Headers = dict(reversed(scope["headers"]))  # The first of several counts.
        client_id = headers.get(b"x-request-id", b"")
        request_id = client_id.decode() if _ID.fullmatch(client_id) else uuid.uuid4().hex
        scope["request_id"] = request_id
        REQUEST_ID.set(request_id)
        # The server omits the body of a response to HEAD.
        request = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        service = scope.get("state", {}).get("service")
        status = _CLIENT_GONE
        started = time.perf_counter()
        body = bytearray()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [(b"x-request-id", request_id.encode()), *_SECURITY_HEADERS]
                if service is not None and service.draining:
                    added.append((b"connection", b"close"))
                known = {name for name, _ in message["headers"]}
                added = [each for each in added if each[0] not in known]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        async def refuse(problem: Problem) -> None:
            if status == _CLIENT_GONE:  # Otherwise a response has begun.
                response = problem_response(problem, request["path"], request_id)
                await response(scope, receive, send_with_headers)

        metrics.IN_FLIGHT.inc()
        try:
            self._admit(request, headers)
            await self._read(body, scope, headers, receive)
            await self._app(request, _replay(bytes(body), receive), send_with_headers)
        except Problem as problem:
            await refuse(problem)
        except ClientGoneError:
            return
        except Exception as error:
            # The last handler before the server: the text of an unknown error is for the log only.
            log.error("the request failed: %r", error, exc_info=error)
            await refuse(Problem(500, "the service failed; its log says why"))
        finally:
            metrics.IN_FLIGHT.dec()
            self._body_bytes -= len(body)
            seconds = time.perf_counter() - started
            route = getattr(request.get("route"), "path", "") or "unknown"
            # Labels that clients can invent would be kept forever.
            method = scope["method"] if scope["method"] in _METHODS else "other"
            metrics.REQUESTS.labels(route, method, str(status)).inc()
            metrics.SECONDS.labels(route).observe(seconds)
            extra = {"status": status, "route": route, "ms": round(seconds * 1e3, 1)}
            log.info("%s %s %s %.1f ms", method, route, status, seconds * 1e3, extra=extra)

    def _admit(self, scope: Message, headers: Headers) -> None:
        path = scope["path"]
        is_admin = path.startswith(("/admin", "/documents"))
        if self._token or (is_admin and self._admin_token):
            kind, _, token = headers.get(b"authorization", b"").partition(b" ")
            tokens = [self._admin_token, *([] if is_admin else [self._token or b""])]
            known = [hmac.compare_digest(token, each) for each in tokens]
            if path not in _OPEN_PATHS and not (kind.lower() == b"bearer" and any(known)):
                raise Problem(
                    401,
                    "a valid token is required; send Authorization: Bearer TOKEN",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            return
        if is_admin:
            self._admit_admin(scope, headers)
        host = headers.get(b"host", b"").decode("latin-1").rpartition(":")
        name = host[0] if host[1] and host[2].isdigit() else "".join(host)
        # Browsers always send a Host header; HTTP/1.0 clients may not.
        if (self._on_loopback or is_admin) and b"host" in headers and not is_loopback(name):
            # A site whose name resolves to this machine could read everything (DNS rebinding).
            what = "administration" if is_admin else "this service"
            raise Problem(421, f"{what} is not available under this host name; use localhost")

    def _admit_admin(self, scope: Message, headers: Headers) -> None:
        client = (scope.get("client") or (None,))[0]
        if not is_loopback(client) or any(map(_FORWARDED.fullmatch, headers)):
            raise Problem(403, "administration needs a token, or a client on the same machine")
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        is_foreign = headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        if is_foreign or (origin is not None and origin.partition(b"://")[2] != host):
            raise Problem(403, "pages of other sites must not administer this service")

    async def _read(
        self, body: bytearray, scope: Message, headers: Headers, receive: Receive
    ) -> None:
        """Read the whole body; the route starts only when the body is complete."""
        close = {"connection": "close"}
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Two lengths allow request smuggling (RFC 9112, 6.1).
            detail = "send either content-length or transfer-encoding, not both"
            raise Problem(400, detail, headers=close)
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            detail = "compressed bodies are not supported; send the body without content-encoding"
            raise Problem(415, detail, headers={"accept-encoding": "identity", **close})
        most = self._limits.body_bytes
        too_large = Problem(413, f"the body has more than {most:,} bytes", headers=close)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > most:
            raise too_large

        async def read() -> None:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                body.extend(part)
                self._body_bytes += len(part)
                if len(body) > most:
                    raise too_large
                if self._body_bytes > self._limits.all_bodies_bytes:
                    metrics.REFUSED.inc()
                    detail = "too many large bodies are in memory; try again after Retry-After"
                    raise overloaded(1, detail)
                if not message.get("more_body", False):
                    return

        try:
            await asyncio.wait_for(read(), self._limits.body_s)
        except asyncio.TimeoutError:
            detail = f"the body was not complete within {self._limits.body_s:g} s"
            raise Problem(408, detail, headers=close) from None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that returns the body first and then the server's messages."""
    parts = [body]

    async def replay() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    return replay
