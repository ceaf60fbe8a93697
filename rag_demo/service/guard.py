"""Guard: what every request passes, whatever its route is.

A plain ASGI middleware: request ids, who may come in, bodies with an end, headers that make a
browser careful, one line of the log for each, and no traceback in any answer.
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
from rag_demo.service.problems import ClientGoneError, Problem, body_of, too_busy
from rag_demo.service.settings import Settings, is_loopback

__all__ = ["HEADERS", "REQUEST_ID", "Guard"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger("rag_demo.service")
REQUEST_ID: contextvars.ContextVar[str] = contextvars.ContextVar("rag_demo_request_id", default="")

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_OPEN = {"/livez", "/readyz", "/health", "/", "/page.css", "/page.js"}
"""What is answered without a token: probes, and the page, which asks for one."""
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"}
_ABSOLUTE = re.compile(r"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)
_FORWARDED = re.compile(rb"forwarded|x-forwarded-.*|x-real-ip|via")
HEADERS = [
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
    """Let requests in, or say why not.

    Args:
        app: What answers them.
        settings: The service's.
    """

    def __init__(self, app: Any, settings: Settings) -> None:
        self._app = app
        self._settings = settings
        self._limits = settings.limits
        self._token = None if settings.token is None else settings.token.encode()
        self._on_loopback = is_loopback(settings.host)
        self._held_bytes = 0  # of all bodies

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            else:  # A WebSocket: nothing here speaks it.
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = dict(reversed(scope["headers"]))  # The first of several counts.
        given = headers.get(b"x-request-id", b"")
        request_id = given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex
        scope["request_id"] = request_id
        REQUEST_ID.set(request_id)
        asked = _in_origin_form(scope, headers)
        answer = _Answer(send, request_id, scope.get("state", {}).get("running"))
        started = time.perf_counter()
        body = bytearray()
        try:
            self._admit(asked, headers)
            await self._read(body, scope, headers, receive)
            await self._app(asked, _replayed(bytes(body), receive), answer.send)
        except Problem as problem:
            await answer.refuse(problem, asked["path"])
        except ClientGoneError:
            return  # Nobody is there to be answered.
        except Exception as error:
            # The last place before the server: whatever failed, its text is not the client's.
            log.error("request %s failed: %r", request_id, error, exc_info=error)
            await answer.refuse(Problem(500, "the service failed; its log says why"), asked["path"])
        finally:
            self._held_bytes -= len(body)
            seconds = time.perf_counter() - started
            route = getattr(asked.get("route"), "path", "") or "unknown"
            # Whatever a client makes up would be counted, and kept, for ever.
            method = scope["method"] if scope["method"] in _METHODS else "other"
            metrics.REQUESTS.labels(route, method, str(answer.status)).inc()
            metrics.SECONDS.labels(route).observe(seconds)
            log.info(
                "%s %s %s %.1f ms",
                method,
                route,
                answer.status,
                seconds * 1e3,
                extra={"status": answer.status, "route": route, "ms": round(seconds * 1e3, 1)},
            )

    def _admit(self, scope: Message, headers: dict[bytes, bytes]) -> None:
        path = scope["path"]
        if self._token is not None:
            kind, _, token = headers.get(b"authorization", b"").partition(b" ")
            is_known = kind.lower() == b"bearer" and hmac.compare_digest(token, self._token)
            if not is_known and path not in _OPEN:
                raise Problem(
                    401,
                    "this service wants a token: Authorization: Bearer TOKEN",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            return
        is_admin = path.startswith("/admin")
        if is_admin:
            self._admit_to_admin(scope, headers)
        host = headers.get(b"host", b"").decode("latin-1").rpartition(":")
        name = host[0] if host[1] and host[2].isdigit() else "".join(host)
        # Who sends no name at all, as HTTP/1.0 may, is no browser.
        if (self._on_loopback or is_admin) and b"host" in headers and not is_loopback(name):
            # A page elsewhere whose name was made to lead here would read, and do, what it likes.
            what = "administration" if is_admin else "this service"
            raise Problem(421, f"{what} answers to localhost only, not to that host's name")

    def _admit_to_admin(self, scope: Message, headers: dict[bytes, bytes]) -> None:
        client = (scope.get("client") or (None,))[0]
        if not is_loopback(client) or any(map(_FORWARDED.fullmatch, headers)):
            raise Problem(403, "administration is for this machine itself, or needs a token")
        origin, host = headers.get(b"origin"), headers.get(b"host", b"")
        is_foreign = headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        if is_foreign or (origin is not None and origin.partition(b"://")[2] != host):
            raise Problem(403, "a page of another site may not administer this service")

    async def _read(
        self, body: bytearray, scope: Message, headers: dict[bytes, bytes], receive: Receive
    ) -> None:
        """Read all of it; nothing works for a client that has not finished asking."""
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # Who believes the other one sees another request behind this one (RFC 9112, 6.1).
            raise Problem(
                400,
                "a body has a content-length or is chunked, not both",
                headers={"connection": "close"},
            )
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Problem(
                415,
                "bodies are read as they are: send this one without content-encoding",
                headers={"accept-encoding": "identity", "connection": "close"},
            )
        most = self._limits.body_bytes
        too_large = Problem(
            413, f"the body has more than {most:,} bytes", headers={"connection": "close"}
        )
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
                self._held_bytes += len(part)
                if len(body) > most:
                    raise too_large
                if self._held_bytes > self._limits.all_bodies_bytes:
                    metrics.REFUSED.inc()
                    raise too_busy(1, "too much is being sent; come again after Retry-After")
                if not message.get("more_body", False):
                    return

        try:
            await asyncio.wait_for(read(), self._limits.body_s)
        except asyncio.TimeoutError:
            raise Problem(
                408,
                f"the body did not come within {self._limits.body_s:g} s",
                headers={"connection": "close"},
            ) from None


def _in_origin_form(scope: Message, headers: dict[bytes, bytes]) -> Message:
    """Return the request that is meant by another: a GET by HEAD, a path by ``http://host/path``.

    The answer to HEAD has no body, which the server leaves out. A name in the target stands for
    the one in the header (RFC 9112, 3.2.2), which is replaced.
    """
    asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
    target = _ABSOLUTE.fullmatch(scope["path"])
    if target is None:
        return asked
    headers[b"host"] = target[1].encode("utf-8", "surrogateescape")
    path = target[2] or "/"
    asked = {**asked, "path": path, "raw_path": path.encode("utf-8", "surrogateescape")}
    others = (each for each in scope["headers"] if each[0] != b"host")
    return asked | {"headers": [(b"host", headers[b"host"]), *others]}


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return what hands the body out at once, and then whatever the server says."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay


class _Answer:
    """What goes back: remembers its status, and adds the headers that all answers have."""

    def __init__(self, send: Send, request_id: str, running: Any) -> None:
        self._send, self._running = send, running
        self._request_id = request_id.encode()
        self.status = 499  # nginx's number for a client that went away

    async def send(self, message: Message) -> None:
        """Send; `rag_demo.service.connections` sees to it that the client reads."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = {name for name, _ in message.get("headers", ())}
            added = [(b"x-request-id", self._request_id), *HEADERS]
            if self._running is not None and self._running.draining:
                # The client's next request would come to a connection that is being closed.
                added.append((b"connection", b"close"))
            headers = [*message.get("headers", ()), *(each for each in added if each[0] not in own)]
            message = {**message, "headers": headers}
        await self._send(message)

    async def refuse(self, problem: Problem, path: str) -> None:
        """Answer with a problem, if nothing has been answered yet."""
        if self.status != 499:
            return
        media_type, body = body_of(problem, path, self._request_id.decode())
        headers = [(b"content-type", media_type.encode()), (b"content-length", b"%d" % len(body))]
        headers += [(name.encode(), value.encode()) for name, value in problem.headers.items()]
        await self.send(
            {"type": "http.response.start", "status": problem.status, "headers": headers}
        )
        await self.send({"type": "http.response.body", "body": body})
