"""JSON answers: written by orjson, limited in size, and off the event loop when they are large."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import orjson
from starlette.responses import Response

from rag_demo.service.problems import Problem

__all__ = ["JSONAnswer", "large_answer"]

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
_DEPTH = 3  # Lists and mappings down to here are written item by item.


class JSONAnswer(Response):
    """A small answer, written at once."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the content as JSON."""
        return _dumps(content)


async def large_answer(content: Any, max_bytes: int) -> Response:
    """Write an answer of any size in a thread, so that the event loop goes on.

    Raises:
        Problem: It has more than ``max_bytes``.
    """
    body = await asyncio.to_thread(_bounded, content, max_bytes)
    return Response(body, media_type="application/json")


def _bounded(content: Any, max_bytes: int) -> bytes:
    parts, size = [], 0
    for part in _parts(content, _DEPTH):
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise Problem(413, f"the answer has more than {max_bytes:,} bytes; ask for less")
    return b"".join(parts)


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    """Yield JSON in parts: one call of orjson would hold the interpreter's lock throughout."""
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
        # Lone surrogates, whole numbers over 64 bits and deep nesting, which metadata may have.
        plain = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
        return json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")
