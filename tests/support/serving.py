"""A service in this process: its application, a small index, and a client.

Only this module of the tests imports the application.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.small_collections import Hashed
from tests.support.waiting import wait_for_async

for package in ("fastapi", "uvicorn", "pydantic_settings", "prometheus_client", "httpx"):
    pytest.importorskip(package, reason=f"needs {package}: the extras service and test")

import httpx  # noqa: E402

from rag_demo import FaissRetriever  # noqa: E402
from rag_demo.service.server import create_app  # noqa: E402
from rag_demo.service.settings import Limits, Settings, options, read_tokens  # noqa: E402

TEXTS = [
    "memory is given back in place",
    "a lease lends a model",
    "<script>alert('indexed')</script> is text",
    "the index stays in its file",
]


class Embedder(Hashed):
    """An embedding model with vectors of length 1 that records its queries.

    Args:
        before: Called with the queries before they are embedded.
    """

    def __init__(self, before: Callable[[list[str]], None] = lambda texts: None) -> None:
        self.before = before
        self.calls: list[list[str]] = []

    def embed_query(self, text: str) -> Any:
        return self.embed_queries([text])[0]

    def embed_queries(self, texts: Any) -> Any:
        self.calls.append(list(texts))
        self.before(list(texts))
        return self.embed_documents(texts)

    def embed_documents(self, texts: Any) -> Any:
        vectors = super().embed_documents(texts)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def load_hanging_model() -> Embedder:
    """Return a model that takes ten minutes for the query "hang"; another process can import it."""
    return Embedder(lambda texts: time.sleep(600 * ("hang" in texts)))


def make_index(folder: Path, texts: list[str] = TEXTS) -> Path:
    """Save an index of a few texts; return its folder."""
    with FaissRetriever(Embedder()) as retriever:
        metadata = [
            {"year": 2000 + row, "path": f"/secret/folder/{row}.txt"} for row in range(len(texts))
        ]
        retriever.add(texts, metadata)
        retriever.save(folder)
    return folder


def read_settings(**options: Any) -> Any:
    """Return settings, which are read from options, variables and files; check their tokens."""
    settings = Settings.read(**options)
    read_tokens(settings)
    return settings


def settings_table() -> str:
    """Return the table of options in the documentation, made of the settings."""
    rows = []
    for option in options():
        text, _, default = (option.help or "").rstrip("]").partition(" [default: ")
        shown = default or "no" * option.is_flag
        rows.append(f"| `{option.opts[0]}` | {text.rstrip('.')} | {shown} |")
    return "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])


def make_app(index: Path, load_model: Callable[[], Any], **chosen: Any) -> Any:
    """Create the application; options that `Settings` does not have are limits."""
    names = [name for name in chosen if name not in Settings.model_fields]
    limits = Limits(**{name: chosen.pop(name) for name in names})
    settings = Settings(index=index, retriever=chosen.pop("retriever", "faiss"), **chosen)
    return create_app(settings, limits=limits, load_model=load_model)


@contextlib.asynccontextmanager
async def serving(
    index: Path, embedder: Embedder | None = None, client: str = "127.0.0.1", **options: Any
) -> AsyncIterator[Any]:
    """Run the application; yield a client with the application as ``app``.

    ``is_ready=False`` does not wait until the model is loaded.
    """
    model = embedder or Embedder()
    load = options.pop("load", lambda: model)
    is_ready = options.pop("is_ready", True)
    app = make_app(index, load, **options)
    async with app.router.lifespan_context(app) as state:

        async def with_state(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        transport = httpx.ASGITransport(with_state, client=(client, 1))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8000", timeout=60
        ) as http:
            http.app = with_state  # type: ignore[attr-defined]
            while is_ready and (await http.get("/readyz")).status_code != 200:
                await asyncio.sleep(0.005)
            yield http


def ask(index: Path, *requests: Any, **options: Any) -> list[Any]:
    """Send requests to a new service, one after the other; return the responses.

    Args:
        index: Folder of the index.
        requests: A method, a path and the options of httpx for each request.
        options: See `serving`.
    """

    async def main() -> list[Any]:
        async with serving(index, **options) as client:
            return [await client.request(*each[:2], **each[2]) for each in requests]

    return asyncio.run(main())


async def metric(client: Any, sample: str) -> float:
    """Return the value of a sample of the model's lane, such as "rag_demo_waiting_tokens"."""
    _, _, rest = (await client.get("/metrics")).text.partition(f'{sample}{{lane="model"}} ')
    return float(rest.split()[0]) if rest else 0.0


async def wait_for_tokens(client: Any, are_enough: Callable[[float], bool]) -> None:
    """Wait until as many tokens as that are in the model's queue."""

    async def have_come() -> bool:
        return are_enough(await metric(client, "rag_demo_waiting_tokens"))

    await wait_for_async(have_come)


def search(body: Any, **headers: str) -> Any:
    return "POST", "/search", {"json": body, "headers": headers}
