"""Middleware that every request passes before its route.

It assigns request ids, checks tokens and host names before a body is read, limits bodies and
responses, and logs each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from h11 import LocalProtocolError
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from rag_demo.errors import RagDemoError
from rag_demo.printable import on_one_line
from rag_demo.service import metrics
from rag_demo.service.logs import REQUEST_ID, log_error
from rag_demo.service.probes import PAGE_FILES
from rag_demo.service.responses import Problem, overloaded, problem_of, problem_response
from rag_demo.service.settings import Limits, Settings, is_loopback

Headers = dict[bytes, bytes]

log = logging.getLogger("rag_demo.service")
_OPEN_PATHS = {"/livez", "/readyz", "/health", *PAGE_FILES}
_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_FORWARDED = re.compile(rb"forwarded|x-forwarded-.*|x-real-ip|via")
_CLIENT_GONE = 499  # nginx's status for a client that closed its connection
_METHODS = frozenset(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
_SHOWN_CHARS = 100  # of a path that has no route
_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]


class Guard:
    """Admit requests or refuse them.

    Args:
        app: The application behind the guard.
        settings: The service's settings.
        limits: The service's limits.
    """

    def __init__(self, app: Any, settings: Settings, limits: Limits) -> None:
        self._app, self._limits = app, limits
        self._on_loopback = is_loopback(settings.host)
        self._bytes = 0  # of all bodies and responses that are in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Headers = dict(reversed(scope["headers"]))  # The first of several counts.
        client_id = headers.get(b"x-request-id", b"")
        request_id = client_id.decode() if _ID.fullmatch(client_id) else uuid.uuid4().hex
        REQUEST_ID.set(request_id)
        service = scope["state"]["service"]
        status, taken, size, started = _CLIENT_GONE, 0, 0, time.perf_counter()

        def take_bytes(count: int) -> None:
            nonlocal taken
            if self._bytes + count > self._limits.buffer_bytes:
                metrics.REFUSED.inc()
                raise overloaded(1, "too many bytes are in memory; try again after Retry-After")
            self._bytes += count
            taken += count

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            part = len(message.get("body", b""))
            take_bytes(part)
            size += part
            if size > self._limits.max_body_bytes:
                detail = f"the body has more than {self._limits.max_body_bytes:,} bytes"
                raise Problem(413, detail, headers={"connection": "close"})
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = [*_HEADERS, (b"x-request-id", request_id.encode())]
                added += [(b"connection", b"close")] * service.draining
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        # The server omits the body of a response to HEAD.
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        request = {**scope, "method": method, "request_id": request_id, "take_bytes": take_bytes}
        metrics.IN_FLIGHT.inc()
        try:
            self._admit(request, headers, *service.tokens)
            await self._app(request, limited, send_with_headers)
        except ClientDisconnect:
            pass
        except (Exception, asyncio.CancelledError) as error:  # The last handler before the server.
            problem = _problem(error)
            if status == _CLIENT_GONE:  # Otherwise a response has begun.
                response = problem_response(problem, scope["path"], request_id)
                # The server has answered an invalid body itself.
                with contextlib.suppress(LocalProtocolError):
                    await response(scope, receive, send_with_headers)
        finally:
            metrics.IN_FLIGHT.dec()
            self._bytes -= taken
            seconds = time.perf_counter() - started
            # Labels that clients can invent would be kept forever.
            route = getattr(request.get("route"), "path", "unknown")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            metrics.REQUESTS.labels(route, method, str(status)).inc()
            metrics.SECONDS.labels(route).observe(seconds)
            client = (scope.get("client") or ("unknown",))[0]
            # A request that was refused has no route.
            shown = on_one_line(scope["path"][:_SHOWN_CHARS]) if route == "unknown" else route
            extra = {"client": client, "method": method, "route": shown, "status": status}
            line = (*extra.values(), seconds * 1e3)
            log.info("%s %s %s %s %.1f ms", *line, extra={**extra, "ms": round(seconds * 1e3, 1)})

    def _admit(
        self, scope: Scope, headers: Headers, clients: Sequence[bytes], admins: Sequence[bytes]
    ) -> None:
        """Refuse a request without the token that it needs.

        It does so before the body is read; a dependency of FastAPI runs afterwards.

        Raises:
            Problem: The token or the host name is wrong.
        """
        path, method = scope["path"], scope["method"]
        if method == "GET" and path in _OPEN_PATHS and clients:
            return
        is_change = path.startswith("/documents") and method != "GET"
        is_admin = is_change or path.startswith(("/admin", "/debug"))
        if clients or (is_admin and admins):
            kind, _, token = headers.get(b"authorization", b"").partition(b" ")
            token = token.strip()
            if is_admin and (not admins or token in clients):
                how = "send one" if admins else "its operator sets RAG_DEMO_ADMIN_TOKEN"
                raise Problem(403, f"changes and administration need an admin token; {how}")
            known = admins if is_admin else [*admins, *clients]
            is_known = sum(hmac.compare_digest(token, each) for each in known)
            if kind.lower() != b"bearer" or not is_known:
                detail = "a valid token is required; send Authorization: Bearer TOKEN"
                challenge = {"www-authenticate": "Bearer"}
                raise Problem(401, detail, code="invalid_api_key", headers=challenge)
            return
        host = headers.get(b"host", b"localhost").decode("latin-1")
        if self._on_loopback and not is_loopback(re.sub(r":\d+$", "", host)):
            # A site whose name resolves to this machine could read everything (DNS rebinding).
            raise Problem(421, "this service is not available under this host name; use localhost")
        if is_admin and (not self._on_loopback or _is_foreign(headers)):
            raise Problem(403, "administration needs a token, or a client on the same machine")


def _problem(error: BaseException) -> Problem:
    if isinstance(error, asyncio.CancelledError):  # The server does not wait any longer.
        return overloaded(1, "the service is stopping", status=503)
    if isinstance(error, (Problem, RagDemoError)):
        return problem_of(error)
    log_error("the request failed", error)
    return Problem(500, "the service failed; its log says why")


def _is_foreign(headers: Headers) -> bool:
    """Tell whether a request comes from a proxy or from a page of another site."""
    origin, host = headers.get(b"origin"), headers.get(b"host", b"")
    return (
        any(map(_FORWARDED.fullmatch, headers))
        or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        or (origin is not None and origin.partition(b"://")[2] != host)
    )
