"""The page, and a readable form of the OpenAPI description."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

__all__ = ["router"]

_FOLDER = resources.files("rag_demo.service") / "page"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

router = APIRouter(include_in_schema=False)


def _file(name: str) -> Response:
    media_type = _TYPES[name.rpartition(".")[2]]
    return Response((_FOLDER / name).read_bytes(), media_type=f"{media_type}; charset=utf-8")


@router.get("/", response_model=None)
async def page() -> Response:
    """Return the page."""
    return _file("page.html")


@router.get("/page.css", response_model=None)
async def style() -> Response:
    """Return its style."""
    return _file("page.css")


@router.get("/page.js", response_model=None)
async def script() -> Response:
    """Return its script."""
    return _file("page.js")


@router.get("/docs", response_model=None)
async def docs(request: Request) -> Response:
    """Return the OpenAPI description as a page, without scripts."""
    description = request.app.openapi()
    schemas = description["components"]["schemas"]
    parts = [(_FOLDER / "docs.html").read_text(encoding="utf-8")]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(method.upper(), path, operation, schemas))
    return Response("".join(parts), media_type="text/html; charset=utf-8")


def _operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    text = [f"<article class=card><h2>{method} <code>{html.escape(path)}</code></h2>"]
    text.append(f"<p>{html.escape(operation.get('description', ''))}</p>")
    content = operation.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    schema = schemas.get(reference.rpartition("/")[2], {})
    for name, field in schema.get("properties", {}).items():
        mark = " (required)" if name in schema.get("required", ()) else ""
        note = html.escape(field.get("description", ""))
        text.append(f"<p><code>{html.escape(name)}</code>{mark} {note}</p>")
    for example in schema.get("examples", ()):
        text.append(f"<pre>{html.escape(json.dumps(example, indent=2))}</pre>")
    return "".join([*text, "</article>"])
