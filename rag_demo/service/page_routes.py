"""The page: files that are sent as they are."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response

__all__ = ["router"]

router = APIRouter(include_in_schema=False)
_FOLDER = resources.files("rag_demo.service") / "page"


def _file(name: str, media_type: str) -> Response:
    return Response((_FOLDER / name).read_bytes(), media_type=media_type)


@router.get("/", response_model=None)
async def page() -> Response:
    """Show the page."""
    return _file("page.html", "text/html; charset=utf-8")


@router.get("/page.css", response_model=None)
async def style() -> Response:
    """Show it well."""
    return _file("page.css", "text/css; charset=utf-8")


@router.get("/page.js", response_model=None)
async def script() -> Response:
    """Make it work."""
    return _file("page.js", "text/javascript; charset=utf-8")
