"""Errors as answers: problem details (RFC 9457), and OpenAI's error body below ``/v1``.

What an answer says was written for it: texts of exceptions name files of this machine, and stay
in the log.
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
from starlette.responses import JSONResponse, Response

__all__ = [
    "AsciiJSON",
    "ClientGoneError",
    "Problem",
    "body_of",
    "for_http",
    "for_problem",
    "for_validation",
    "status_of_invalid",
    "too_busy",
]

_SHOWN_CHARS = 300
_SHOWN_ERRORS = 10


class Problem(Exception):  # noqa: N818  (an answer, by the name of RFC 9457)
    """A request that is refused, or could not be answered.

    Args:
        status: Of HTTP.
        detail: What happened, and what to do about it.
        code: A short name, for programs.
        param: Which part of the request it is about.
        headers: Of the answer.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.code, self.param = status, detail, code, param
        self.headers = dict(headers or {})
        self.errors: Sequence[Mapping[str, str]] = ()


def too_busy(wait_s: float, detail: str, status: int = 429) -> Problem:
    """Make the refusal of a request that may come again later."""
    seconds = str(max(1, math.ceil(wait_s)))
    return Problem(status, detail, code="overloaded", headers={"retry-after": seconds})


class ClientGoneError(Exception):
    """The client has closed its connection: whatever was to be answered is not wanted."""


class AsciiJSON(JSONResponse):
    """JSON that every parser takes: no lone surrogates, and null for what is no number."""

    def render(self, content: Any) -> bytes:
        """Write it."""
        try:
            return _dumps(content)
        except ValueError:
            return _dumps(_finite(content))


def _dumps(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def _is_openai(path: str) -> bool:
    """Return whether a path is answered as OpenAI answers it."""
    return path.startswith("/v1/")


def status_of_invalid(request: Request) -> int:
    """Return the status of what is no such request as it should be."""
    return 400 if _is_openai(request.url.path) else 422


def body_of(problem: Problem, path: str, request_id: str) -> tuple[str, bytes]:
    """Write what is answered.

    Returns:
        Its media type, and the body.
    """
    content: dict[str, Any]
    if _is_openai(path):
        kind = "server_error" if problem.status >= 500 else "invalid_request_error"
        if problem.status == 429:
            kind = "rate_limit_error"
        message = problem.detail
        if problem.errors:
            message = "; ".join(f"{each['pointer']}: {each['detail']}" for each in problem.errors)
        content = {
            "error": {
                "message": message,
                "type": kind,
                "param": problem.param,
                "code": problem.code,
            }
        }
        return "application/json", _dumps(content)
    content = {
        "type": "about:blank",
        "title": http.HTTPStatus(problem.status).phrase,
        "status": problem.status,
        "detail": problem.detail,
        "request_id": request_id,
    }
    if problem.code:
        content["code"] = problem.code
    if problem.errors:
        content["errors"] = list(problem.errors)
    return "application/problem+json", _dumps(content)


def _answer(request: Request, problem: Problem) -> Response:
    path, request_id = request.url.path, request.scope.get("request_id", "")
    media_type, body = body_of(problem, path, request_id)
    return Response(body, problem.status, problem.headers, media_type)


async def for_problem(request: Request, error: Any) -> Response:
    """Answer a `Problem`."""
    return _answer(request, error)


async def for_http(request: Request, error: Any) -> Response:
    """Answer what the framework refuses: an unknown path, a wrong method, broken JSON."""
    assert isinstance(error, HTTPException)
    detail = {
        404: "there is nothing at this path",
        405: "this path does not take this method",
        400: "the body is no JSON that can be read",
    }.get(error.status_code, http.HTTPStatus(error.status_code).phrase)
    headers = {name.lower(): text for name, text in (error.headers or {}).items()}
    if headers.get("allow") == "GET":
        headers["allow"] = "GET, HEAD"
    return _answer(request, Problem(error.status_code, detail, headers=headers))


_SAID = {
    "extra_forbidden": "there is no such field; /openapi.json has those that there are",
    "missing": "this field has to be there",
    "model_type": "this has to be a JSON object",
    "model_attributes_type": "this has to be a JSON object",
    "dict_type": "this has to be a JSON object",
    "list_type": "this has to be a list",
    "string_type": "this has to be a text",
}


def _said_of(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing" and len(error["loc"]) == 1:
        return "there is no body; send a JSON object, which /openapi.json has examples of"
    return _SAID.get(error["type"]) or str(error["msg"]).removeprefix("Value error, ")


async def for_validation(request: Request, error: Any) -> Response:
    """Answer a request that is not of the shape it should have; what was sent is not repeated."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()[:_SHOWN_ERRORS]
    if found and found[0]["type"] == "json_invalid":  # What it points to is no part of a request.
        return await for_http(request, HTTPException(400))
    is_json = "json" in request.headers.get("content-type", "")
    hint = "" if is_json else ", and send it with content-type: application/json"
    problem = Problem(
        status_of_invalid(request),
        f"the request is not what it should be; see errors{hint}",
        code="invalid_request",
    )
    problem.errors = [
        {
            "pointer": "#" + "".join(f"/{part}" for part in each["loc"][1:])[:_SHOWN_CHARS],
            "detail": _said_of(each)[:_SHOWN_CHARS],
        }
        for each in found
    ]
    if found and len(found[0]["loc"]) > 1:
        problem.param = str(found[0]["loc"][1])[:_SHOWN_CHARS]
    return _answer(request, problem)
