"""JSON responses: written by orjson in parts, and limited in size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import orjson
from starlette.responses import Response

from rag_demo.service.problems import Problem

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_DEPTH = 3  # Lists and mappings down to this level are written item by item.
_TURN_BYTES = 1 << 16


async def json_response(content: Any, max_bytes: int) -> Response:
    """Write a response; other requests get their turn every 64 KB.

    Raises:
        Problem: It has more than ``max_bytes``.
    """
    parts, size, turn = [], 0, 0
    for part in _parts(content, _DEPTH):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise Problem(413, f"the response has more than {max_bytes:,} bytes; request less")
        if size - turn > _TURN_BYTES:
            turn = size
            await asyncio.sleep(0)
    return Response(b"".join(parts), media_type="application/json")


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    if depth and isinstance(value, dict):
        for number, (key, item) in enumerate(value.items()):
            yield (b"," if number else b"{") + _dumps(str(key)) + b":"
            yield from _parts(item, depth - 1)
        yield b"}" if value else b"{}"
    elif depth and isinstance(value, list):
        for number, item in enumerate(value):
            yield b"," if number else b"["
            yield from _parts(item, depth - 1)
        yield b"]" if value else b"[]"
    else:
        yield _dumps(value)


def _dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=_OPTIONS)
    except TypeError:
        # Metadata may have lone surrogates, integers over 64 bits and deep nesting.
        plain = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
        return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")
