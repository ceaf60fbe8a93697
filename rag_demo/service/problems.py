"""Errors as answers, in the format of each API: RFC 9457, OpenAI's, text-embeddings-inference's.

Answers never contain the text of an unexpected exception, which may name files of this machine.
"""

from __future__ import annotations

import http
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

__all__ = [
    "ClientGoneError",
    "Problem",
    "error_body",
    "handle_http_exception",
    "handle_problem",
    "handle_validation_error",
    "invalid_status",
    "overloaded",
]

_MAX_CHARS = 300  # of a message about a request
_MAX_ERRORS = 10
_TEI_PATHS = ("/embed", "/rerank", "/info")
_TEI_TYPES = {400: "Empty", 401: "Unauthorized", 424: "Backend", 429: "Overloaded"}
_MESSAGES = {
    "extra_forbidden": "unknown field; /openapi.json lists the known ones",
    "missing": "this field is required",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
    "dict_type": "must be a JSON object",
    "list_type": "must be a list",
    "string_type": "must be a string",
}


class Problem(Exception):  # noqa: N818  (the name of RFC 9457)
    """A request that is refused or cannot be answered.

    Args:
        status: HTTP status.
        detail: What is wrong and what to do.
        code: A short name for programs.
        param: The field of the request that is wrong.
        headers: Headers of the answer.
        errors: Several errors, each with a JSON pointer into the request.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        errors: Sequence[Mapping[str, str]] = (),
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.code, self.param = status, detail, code, param
        self.headers, self.errors = dict(headers or {}), list(errors)


class ClientGoneError(Exception):
    """The client has closed its connection, so no answer is needed."""


def overloaded(wait_s: float, detail: str, status: int = 429) -> Problem:
    """Return a refusal with Retry-After."""
    seconds = str(max(1, math.ceil(wait_s)))
    return Problem(status, detail, code="overloaded", headers={"retry-after": seconds})


def invalid_status(path: str) -> int:
    """Return the status for a request that fails validation."""
    return 400 if path.startswith(("/v1/", "/v2/")) else 422


def error_body(problem: Problem, path: str, request_id: str) -> tuple[str, bytes]:
    """Return the media type and the body for a problem, in the format of the path's API."""
    message = problem.detail
    if problem.errors:
        message = "; ".join(f"{each['pointer']}: {each['detail']}" for each in problem.errors)
    content: dict[str, Any]
    if path in _TEI_PATHS:
        kind = "Unhealthy" if problem.status >= 500 else "Validation"
        kind = _TEI_TYPES.get(problem.status, kind)
        return "application/json", _dumps({"error": message, "error_type": kind})
    if path.startswith("/v2/"):  # Cohere's.
        return "application/json", _dumps({"message": message, "id": request_id})
    if path.startswith("/v1/"):
        kind = "server_error" if problem.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if problem.status == 429 else kind
        content = {"message": message, "type": kind, "param": problem.param, "code": problem.code}
        return "application/json", _dumps({"error": content})
    content = {
        "type": "about:blank",
        "title": http.HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
        "request_id": request_id,
    }
    content |= {"code": problem.code} if problem.code else {}
    content |= {"errors": problem.errors} if problem.errors else {}
    return "application/problem+json", _dumps(content)


def _dumps(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode("ascii")


async def handle_problem(request: Request, error: Any) -> Response:
    """Answer a `Problem`."""
    path, request_id = request.url.path, request.scope.get("request_id", "")
    media_type, body = error_body(error, path, request_id)
    return Response(body, error.status, error.headers, media_type)


async def handle_http_exception(request: Request, error: Any) -> Response:
    """Answer what the framework refuses: an unknown path, a wrong method, invalid JSON."""
    detail = {
        404: "there is nothing at this path",
        405: "this path does not support this method",
        400: "the body is not valid JSON",
    }.get(error.status_code, http.HTTPStatus(error.status_code).phrase)
    headers = {name.lower(): text for name, text in (error.headers or {}).items()}
    if headers.get("allow") == "GET":
        headers["allow"] = "GET, HEAD"
    return await handle_problem(request, Problem(error.status_code, detail, headers=headers))


async def handle_validation_error(request: Request, error: Any) -> Response:
    """Answer a request that fails validation, without repeating what was sent."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()[:_MAX_ERRORS]
    if found and found[0]["type"] == "json_invalid":
        return await handle_http_exception(request, HTTPException(400))
    is_json = "json" in request.headers.get("content-type", "")
    hint = "" if is_json else "; send it with content-type: application/json"
    errors = [
        {
            "pointer": "#" + "".join(f"/{part}" for part in each["loc"][1:])[:_MAX_CHARS],
            "detail": _message(each)[:_MAX_CHARS],
        }
        for each in found
    ]
    param = str(found[0]["loc"][1])[:_MAX_CHARS] if found and len(found[0]["loc"]) > 1 else None
    problem = Problem(
        invalid_status(request.url.path),
        f"the request is invalid; see errors{hint}",
        code="invalid_request",
        param=param,
        errors=errors,
    )
    return await handle_problem(request, problem)


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing" and len(error["loc"]) == 1:
        return "the body is empty; send a JSON object, see /openapi.json"
    return _MESSAGES.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ")
