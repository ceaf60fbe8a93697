"""Calls that hang, loads that fail, tokens, and changes of the index."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from support.serving import (
    TEXTS,
    Embedder,
    Limits,
    ask,
    load_hanging_model,
    make_index,
    search,
    serving,
)
from support.waiting import wait_for_async


@pytest.mark.slow
def test_hung_call_gets_504_and_fails_probes(index: Path) -> None:
    """The service stops without waiting for the call."""
    never = threading.Event()

    def hang(texts: list[str]) -> None:
        if "hang" in texts:
            never.wait(600)

    async def main() -> list[int]:
        async with serving(index, Embedder(hang), limits=Limits(answer_s=3)) as client:
            hung = await client.post("/search", json={"query": "hang", "mode": "dense"})

            async def is_dead() -> bool:
                return bool((await client.get("/livez")).status_code == 503)

            await wait_for_async(is_dead)
            return [hung.status_code, (await client.get("/readyz")).status_code]

    try:
        assert asyncio.run(main()) == [504, 503]
    finally:
        never.set()


@pytest.mark.slow
def test_hung_call_in_process_gets_503_and_new_process(index: Path) -> None:

    async def main() -> None:
        options: Any = {"isolation": "process", "call_timeout_s": 5.0, "load": load_hanging_model}
        async with serving(index, **options) as client:

            async def status(query: str) -> int:
                body = {"query": query, "mode": "dense"}
                return int((await client.post("/search", json=body)).status_code)

            async def answers() -> bool:
                return await status("a") == 200

            assert await status("hang") == 503
            await wait_for_async(answers)

    asyncio.run(main())


def test_failed_load_is_retried_until_ready(index: Path) -> None:
    broken = threading.Event()

    def load() -> Any:
        if broken.is_set():
            raise RuntimeError("no weights")
        return Embedder()

    async def main() -> None:
        async with serving(index, load=load) as client:

            async def has_status(status: int) -> bool:
                return bool((await client.get("/readyz")).status_code == status)

            assert await has_status(200)
            assert (await client.post("/admin/models/hashed/unload")).status_code == 200
            broken.set()
            body = {"query": "a", "mode": "dense"}
            assert (await client.post("/search", json=body)).status_code == 503
            assert await has_status(503)
            broken.clear()
            await wait_for_async(lambda: has_status(200))

    asyncio.run(main())


def test_response_over_limit_gets_413(index: Path, tmp_path: Path) -> None:
    long = make_index(tmp_path / "long", ["x" * 100_000])
    body = {"query": "x", "mode": "dense"}
    statuses = [
        ask(long, search(body), limits=Limits(answer_bytes=most))[0].status_code
        for most in (50_000, 200_000)
    ]
    assert statuses == [413, 200]


@pytest.mark.parametrize("token", ["search", "admin"])
def test_search_token_does_not_administer(index: Path, token: str) -> None:
    headers = {"headers": {"authorization": f"Bearer {token}"}}
    found, models = ask(
        index,
        ("POST", "/search", {"json": {"query": "a"}, **headers}),
        ("GET", "/admin/models", headers),
        token="search",
        admin_token="admin",
    )
    assert found.status_code == 200
    assert models.status_code == (200 if token == "admin" else 401)


def test_writable_index_adds_and_deletes_documents(tmp_path: Path) -> None:
    folder = make_index(tmp_path / "index")
    new = {"documents": [{"id": "new", "text": "a zebra", "metadata": {"lang": "en"}}]}
    refused = ask(folder, ("PUT", "/documents", {"json": new}))[0]
    large = {"documents": [{"id": str(n), "text": "x" * 101} for n in range(2)]}
    wrong = '{"documents": [{"id": "n", "text": "n", "metadata": {"a": NaN}}]}'
    too_large, invalid = ask(
        folder,
        ("PUT", "/documents", {"json": large}),
        ("PUT", "/documents", {"content": wrong, "headers": {"content-type": "application/json"}}),
        writable=True,
        limits=Limits(change_chars=200),
    )
    assert (too_large.status_code, invalid.status_code) == (413, 422)
    put, found, deleted, again, ready = ask(
        folder,
        ("PUT", "/documents", {"json": new}),
        search({"query": "a zebra", "where": {"$not": {"$or": [{"year": {"$gt": 1}}]}}}),
        ("DELETE", "/documents/new", {}),
        ("DELETE", "/documents/new", {}),
        ("GET", "/readyz", {}),
        writable=True,
    )
    assert refused.status_code == 403
    assert put.json() == {"ids": ["new"], "documents": len(TEXTS) + 1}
    assert [each["id"] for each in found.json()["results"]] == ["new"]
    assert (deleted.status_code, again.status_code) == (200, 404)
    assert ready.json()["documents"] == len(TEXTS)


def test_other_clients_get_their_error_format(index: Path) -> None:
    unknown, rewrite, null, rerank, invalid, info = ask(
        index,
        ("POST", "/v1/embeddings", {"json": {"input": "a", "model": "other"}}),
        (
            "POST",
            "/v1/vector_stores/index/search",
            {"json": {"query": "a", "rewrite_query": True}},
        ),
        ("POST", "/v1/embeddings", {"json": {"input": "a", "encoding_format": None}}),
        ("POST", "/rerank", {"json": {"query": "a", "texts": ["b"]}}),
        ("POST", "/embed", {"json": {}}),
        ("GET", "/info", {}),
    )
    assert unknown.status_code == 404 and "hashed" in unknown.json()["error"]["message"]
    assert rewrite.status_code == 400
    assert rerank.status_code == 404 and "--reranker" in rerank.json()["error"]
    assert invalid.status_code == 422 and set(invalid.json()) == {"error", "error_type"}
    assert info.json()["model_id"] == "hashed"
    assert isinstance(null.json()["data"][0]["embedding"], list)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--call-timeout", "5"], "--call-timeout needs --isolation process"),
        (["--cors-origin", "https://x/"], "got 'https://x/'"),
        (["--no-token", "--token-file", "token"], "either --no-token or --token-file"),
        (["--writable", "--workers", "2"], "--writable needs --workers 1"),
    ],
)
def test_options_without_effect_are_refused(index: Path, options: list[str], message: str) -> None:
    command = [sys.executable, "-m", "rag_demo", "serve", "--index", str(index), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert message in done.stderr
