"""Error responses in the format of each API: RFC 9457, OpenAI, Cohere, text-embeddings-inference.

Responses never contain the text of an unexpected exception, which may name files of the server.
"""

from __future__ import annotations

import http
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from rag_demo.errors import IndexFileError, ModelError, ModelMismatchError

_MAX_CHARS = 300  # of one field of an error
_MAX_ERRORS = 10
_UNION = re.compile(
    r"\[|^(str|constrained-str|RerankDocument|RerankRequest|DocumentsRerankRequest)$"
)
_TOO_SHORT = {"too_short", "string_too_short"}
_TEI_PATHS = ("/", "/embed", "/rerank", "/info")
_TEI_TYPES = {400: "Empty", 401: "Unauthorized", 424: "Backend", 429: "Overloaded"}
_HTTP_DETAILS = {
    400: "the body is not valid JSON",
    404: "this path does not exist",
    405: "this path does not support this method",
}
_MESSAGES = {
    "extra_forbidden": "unknown field; /openapi.json lists the known fields",
    "missing": "this field is required",
    "model_type": "must be a JSON object",
    "model_attributes_type": "must be a JSON object",
    "dict_type": "must be a JSON object",
    "list_type": "must be a list",
    "string_type": "must be a string",
}


@dataclass(eq=False)
class Problem(Exception):  # noqa: N818  (the name of RFC 9457)
    """A request that is refused or cannot be answered.

    Args:
        status: HTTP status.
        detail: What is wrong and what to do.
        code: A short name for programs; "empty" and "unavailable" have other statuses on the
            routes of text-embeddings-inference.
        param: The field of the request that is wrong.
        headers: Headers of the response.
        errors: Several errors, each with a JSON pointer into the request.
    """

    status: int
    detail: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] | None = None
    errors: Sequence[Mapping[str, str]] = ()


class ClientGoneError(Exception):
    """The client has closed its connection, so no response is needed."""


def overloaded(wait_s: float, detail: str, status: int = 429) -> Problem:
    """Return a refusal with a Retry-After header of ``wait_s`` seconds."""
    seconds = str(max(1, math.ceil(wait_s)))
    return Problem(status, detail, code="overloaded", headers={"retry-after": seconds})


def public_reason(error: BaseException | None) -> str:
    """Describe an error without the names of files."""
    for kind, reason in (
        (ModelMismatchError, "the index was made with another model"),
        (IndexFileError, "the index is missing or damaged"),
        (ModelError, "the model cannot be loaded"),
    ):
        if isinstance(error, kind):
            return reason
    return "the model or the index cannot be opened"


def problem_response(problem: Problem, path: str, request_id: str) -> Response:
    """Return the response for a problem, in the format of the path's API."""
    status, message, media_type = problem.status, problem.detail, "application/json"
    if problem.errors:
        message = "; ".join(f"{each['pointer']}: {each['detail']}" for each in problem.errors)
    content: dict[str, Any]
    if path in _TEI_PATHS:
        status = {"empty": 400, "unavailable": 424}.get(problem.code or "", status)
        kind = _TEI_TYPES.get(status, "Unhealthy" if status >= 500 else "Validation")
        content = {"error": message, "error_type": kind}
    elif path.startswith("/v2/"):  # Cohere
        content = {"message": message, "id": request_id}
    elif path.startswith("/v1/"):  # OpenAI
        status = 400 if status == 422 else status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if status == 429 else kind
        error = {"message": message, "type": kind, "param": problem.param, "code": problem.code}
        content = {"error": error}
    else:
        media_type = "application/problem+json"
        content = {
            "type": "about:blank",
            "title": http.HTTPStatus(status).phrase,
            "status": status,
            "detail": problem.detail,
            "request_id": request_id,
            **({"code": problem.code} if problem.code else {}),
            **({"errors": problem.errors} if problem.errors else {}),
        }
    if path.startswith("/v2/") and status == 422:
        status = 400
    return Response(orjson.dumps(content), status, problem.headers, media_type)


async def raise_problem(request: Request, error: Exception) -> Response:
    """Raise an error of the framework as a `Problem`, which the guard answers.

    Raises:
        Problem: Always. It does not repeat what the client sent.
    """
    if isinstance(error, HTTPException):
        raise _http_problem(error) from None
    assert isinstance(error, RequestValidationError)
    found = error.errors()[:_MAX_ERRORS]
    if found and found[0]["type"] == "json_invalid":
        raise _http_problem(HTTPException(400)) from None
    is_json = "json" in request.headers.get("content-type", "")
    hint = "" if is_json else "; send it with content-type: application/json"
    errors = [
        {
            "pointer": _pointer(each["loc"][1:]),
            "detail": _message(each)[:_MAX_CHARS],
        }
        for each in found
    ]
    raise Problem(
        422,
        f"the request is invalid; see errors{hint}",
        code="empty" if _TOO_SHORT & {each["type"] for each in found} else "invalid_request",
        param=str(found[0]["loc"][1])[:_MAX_CHARS] if len(found[0]["loc"]) > 1 else None,
        errors=errors,
    ) from None


def _pointer(path: Sequence[str | int]) -> str:
    """Return a JSON pointer, without pydantic's names for the members of a union."""
    parts = [str(part) for part in path if not _UNION.search(str(part))]
    return "#" + "".join(f"/{part}" for part in parts)[:_MAX_CHARS]


def _http_problem(error: HTTPException) -> Problem:
    """Convert an unknown path, a wrong method or invalid JSON."""
    status, headers = error.status_code, dict(error.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"
    detail = _HTTP_DETAILS.get(status, http.HTTPStatus(status).phrase)
    return Problem(status, detail, headers=headers)


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing" and len(error["loc"]) == 1:
        return "the body is empty; send a JSON object, see /openapi.json"
    return _MESSAGES.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ")
