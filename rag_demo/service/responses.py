"""JSON responses: written by orjson, limited in size, and counted while they are in memory."""

from __future__ import annotations

import json
from typing import Any

import orjson
from fastapi import Request
from fastapi.security import HTTPBearer
from starlette.responses import Response

from rag_demo.service import metrics
from rag_demo.service.problems import Problem

BEARER = HTTPBearer(auto_error=False, description="A client's token, or the admin token.")
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


class JSONResponse(Response):
    """A response written by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the bytes of the body."""
        try:
            return orjson.dumps(content, option=_OPTIONS)
        except TypeError:
            # Metadata may have lone surrogates, integers over 64 bits and deep nesting.
            plain = json.loads(json.dumps(content, default=list), parse_constant=lambda _: None)
            return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")


def respond(request: Request, content: Any, *, truncated: int = 0) -> JSONResponse:
    """Return a response, with the version of the index and the number of texts cut off.

    Raises:
        Problem: It is too large, or too many bytes are in memory.
    """
    service = request.state.service
    headers = {"x-index-version": service.engine.version}
    if truncated:
        metrics.TRUNCATED.inc(truncated)
        headers["x-truncated-texts"] = str(truncated)
    response = JSONResponse(content, headers=headers)
    most = service.settings.max_response_bytes
    if len(response.body) > most:
        raise Problem(413, f"the response has more than {most:,} bytes; request less")
    request.scope["take_bytes"](len(response.body))
    return response
