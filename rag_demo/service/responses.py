"""Responses: JSON, and errors in the formats of RFC 9457, OpenAI, Cohere and TEI.

Errors never contain the text of an unexpected exception, which may name files of the server.
"""

from __future__ import annotations

import http
import json
import math
import re
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rag_demo.errors import (
    IndexFileError,
    InvalidValueError,
    ModelError,
    ModelMismatchError,
    PostgresError,
    WriterBusyError,
)

BEARER = HTTPBearer(auto_error=False, description="A client's token, or the admin token.")
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_MAX_CHARS = 300  # of one field of an error
_MAX_ERRORS = 10
_NO_JSON = "send the body with content-type: application/json"
_TEI_PATHS = ("/", "/embed", "/rerank", "/info")
_TEI_STATUSES = {"empty": 400, "unavailable": 424}
_TEI_KINDS = {400: "Empty", 401: "Unauthorized", 424: "Backend", 429: "Overloaded"}
_REASONS = {
    ModelMismatchError: "the index was made with another model",
    WriterBusyError: "another process is changing the index",
    IndexFileError: "the index is missing or damaged",
    ModelError: "the model cannot be used",
    PostgresError: "the database cannot be reached",
}


class Problem(HTTPException):
    """A request that is refused or cannot be answered.

    Args:
        status: HTTP status.
        detail: What is wrong and what to do.
        code: A short name for programs; "empty" and "unavailable" have other statuses on the
            routes of text-embeddings-inference.
        param: The field of the request that is wrong.
        headers: Headers of the response.
    """

    def __init__(
        self, status: int, detail: str, *, code: str = "", param: str = "", headers: Any = None
    ) -> None:
        super().__init__(status, detail, headers)
        self.code, self.param = code, param


def overloaded(wait_s: float, detail: str, status: int = 429) -> Problem:
    """Return a refusal with a Retry-After header of ``wait_s`` seconds."""
    seconds = str(max(1, math.ceil(wait_s)))
    return Problem(status, detail, code="overloaded", headers={"retry-after": seconds})


def public_reason(error: BaseException) -> str:
    """Describe an error without the names of files and databases."""
    unknown = "the model or the index cannot be used now"
    return next((text for kind, text in _REASONS.items() if isinstance(error, kind)), unknown)


def problem_of(error: BaseException) -> Problem:
    """Return the problem that an error of a model or an index is for a client."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, InvalidValueError):
        return Problem(422, str(error), code="invalid_request")
    detail = f"{public_reason(error)}; the service's log says why"
    return Problem(503, detail, code="unavailable", headers={"retry-after": "5"})


def problem_response(problem: Problem, path: str, request_id: str) -> Response:
    """Return the response for a problem, in the format of the path's API."""
    status, media_type = problem.status_code, "application/json"
    message, content = problem.detail, dict[str, Any]()
    if path.startswith(("/v1/", "/v2/")) and status == 422:
        status = 400
    if path in _TEI_PATHS:
        status = _TEI_STATUSES.get(problem.code, status)
        kind = _TEI_KINDS.get(status, "Unhealthy" if status >= 500 else "Validation")
        content = {"error": message, "error_type": kind}
    elif path.startswith("/v2/"):  # Cohere
        content = {"message": message, "id": request_id}
    elif path.startswith("/v1/"):  # OpenAI
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if status == 429 else kind
        code, param = problem.code or None, problem.param or None
        content = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    else:
        media_type = "application/problem+json"
        content = {
            "type": "about:blank",
            "title": http.HTTPStatus(status).phrase,
            "status": status,
            "detail": message,
            "request_id": request_id,
            "code": problem.code,
        }
        content = {name: value for name, value in content.items() if value}
    return Response(orjson.dumps(content), status, problem.headers, media_type)


async def respond_to_error(request: Request, error: Any) -> Response:
    """Return the response for a `Problem`, or for an error of the framework.

    Raises:
        ClientDisconnect: The client went away while it sent the body.
    """
    if isinstance(error.__cause__, ClientDisconnect):
        raise error.__cause__
    if isinstance(error, RequestValidationError):
        error = _invalid_request(request, error)
    elif not isinstance(error, Problem):
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == http.HTTPStatus.METHOD_NOT_ALLOWED:
            # starlette names the methods of one of several routes with the path.
            path = re.sub(r":\w+}", "}", getattr(request.scope.get("route"), "path", ""))
            methods = request.app.openapi()["paths"].get(path, {})
            headers |= {"allow": ", ".join(map(str.upper, methods))} if methods else {}
        error = Problem(error.status_code, error.detail, headers=headers)
    return problem_response(error, request.scope["path"], request.scope["request_id"])


def _invalid_request(request: Request, error: RequestValidationError) -> Problem:
    """Describe errors of pydantic, without what the client sent."""
    found = error.errors()[:_MAX_ERRORS]
    if found[0]["type"] == "json_invalid":
        return Problem(400, "the body is not valid JSON")
    is_empty = any(each["type"] in ("too_short", "string_too_short") for each in found)
    has_json = "json" in request.headers.get("content-type", "") or found[0]["loc"][0] != "body"
    details = [] if has_json else [_NO_JSON]
    for each in found:
        pointer = "/".join(["#", *map(str, each["loc"][1:])])[:_MAX_CHARS]
        details.append(f"{pointer}: {str(each['msg']).removeprefix('Value error, ')[:_MAX_CHARS]}")
    param = str([*found[0]["loc"], ""][1])[:_MAX_CHARS]
    code = "empty" if is_empty else "invalid_request"
    return Problem(422, "; ".join(details), code=code, param=param)


def respond(request: Request, content: Any, *, truncated: int = 0) -> Response:
    """Return a response in JSON, with the version of the index and the number of texts cut off.

    Raises:
        Problem: It is too large, or too many bytes are in memory.
    """
    service = request.state.service
    headers = {"x-index-version": service.index.version}
    if truncated:
        headers["x-truncated-texts"] = str(truncated)
    try:
        body = orjson.dumps(content, option=_OPTIONS)
    except TypeError:
        # Metadata may have lone surrogates, integers over 64 bits and deep nesting.
        plain = json.loads(json.dumps(content, default=list), parse_constant=lambda _: None)
        body = json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")
    most = service.limits.max_response_bytes
    if len(body) > most:
        raise Problem(413, f"the response has more than {most:,} bytes; request less")
    request.scope["take_bytes"](len(body))
    return Response(body, headers=headers, media_type="application/json")


def at_most(count: int, most: int, what: str, param: str) -> None:
    """Check a count against a limit of the settings.

    Raises:
        Problem: It is larger.
    """
    if count > most:
        raise Problem(413, f"{count:,} {what}; at most {most:,} are allowed", param=param)


def check_model(model: str, *names: str) -> None:
    """Check that a request names the model that is served, by one of its names.

    Raises:
        Problem: It names another model.
    """
    if model not in (*names, *(each.rpartition("/")[2] for each in names), "default"):
        detail = f"the model {model[:200]!r} does not exist; available: {names[0]!r}, 'default'"
        raise Problem(404, detail, param="model", code="model_not_found")
