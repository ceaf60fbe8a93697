"""Administration: models and their unloading, and reloads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.serving import TEXTS, Embedder, make_index, serving
from tests.support.waiting import wait_for_async

pytestmark = pytest.mark.anyio


async def test_unload_reports_and_next_query_loads_again(index: Path) -> None:
    async with serving(index) as client:

        async def states() -> dict[str, str]:
            models = (await client.get("/admin/models")).json()["models"]
            assert {"name", "nbytes", "expires_in_s", "loads"} <= set(models[0])
            return {each["name"]: each["state"] for each in models}

        assert await states() == {"hashed": "loaded", "index": "loaded"}
        models = (await client.get("/admin/models")).json()["models"]
        assert models[1]["nbytes"] >= 4 * Embedder.dimension * len(TEXTS)
        for name in ("hashed", "index"):
            report = (await client.post(f"/admin/models/{name}/unload")).json()
            assert {"freed_bytes", "still_held", "duration_s"} <= set(report)
        assert report["freed_bytes"]["host"] > 0
        assert await states() == {"hashed": "unloaded", "index": "unloaded"}
        assert (await client.get("/readyz")).status_code == 200
        answer = await client.post("/search", json={"query": TEXTS[0], "mode": "dense"})
        assert answer.json()["results"][0]["id"] == "0"
        assert await states() == {"hashed": "loaded", "index": "loaded"}
        unknown = await client.post("/admin/models/other/unload")
        assert unknown.status_code == 404


async def test_reload_fails_no_request(tmp_path: Path) -> None:
    folder = make_index(tmp_path / "index")
    async with serving(folder) as client:
        counts: list[int] = []
        done = asyncio.Event()

        async def ask() -> None:
            while not done.is_set():
                answer = await client.post(
                    "/search", json={"query": "a", "top_k": 9, "mode": "dense"}
                )
                assert answer.status_code == 200, answer.text
                counts.append(len(answer.json()["results"]))

        clients = [asyncio.create_task(ask()) for _ in range(4)]
        await wait_for_async(lambda: bool(counts))
        await asyncio.to_thread(make_index, folder, [*TEXTS, "and a new one"])
        report = await client.post("/admin/reload")
        after = len(counts)
        await wait_for_async(lambda: len(counts) >= after + 5)
        done.set()
        await asyncio.gather(*clients)
        assert report.json()["documents"] == 5
        metrics = (await client.get("/metrics")).text
        assert 'torch_utils_model_loaded{model="index"} 1.0' in metrics
        models = (await client.get("/admin/models")).json()["models"]
        assert [each["loads"] for each in models] == [1, 1]  # Two may not fit on a device.
        assert set(counts[:1]) == {4}
        assert counts[-1] == 5


async def test_changed_model_is_refused(index: Path) -> None:
    """Its vectors could not be compared with those of the index."""
    embedder = Embedder()
    async with serving(index, embedder) as client:
        assert (await client.post("/search", json={"query": "a"})).status_code == 200
        await client.post("/admin/models/hashed/unload")
        embedder.name = "another"
        assert (await client.post("/search", json={"query": "a"})).status_code == 503
