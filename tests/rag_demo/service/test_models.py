"""Models and the index: unloads, reloads, calls and loads that hang or fail, and damage."""

import asyncio
import os
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.service_program import service
from tests.support.serving import TEXTS, Embedder, load_hanging_model, make_index, serving
from tests.support.waiting import wait_for, wait_for_async

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_hung_call_in_process_gets_503_and_new_process(index: Path) -> None:
    options: Any = {"isolation": "process", "hang_timeout": 5.0, "load": load_hanging_model}
    async with serving(index, **options) as client:

        async def has_status(query: str, status: int) -> bool:
            answer = await client.post("/search", json={"query": query, "mode": "dense"})
            return bool(answer.status_code == status)

        assert await has_status("hang", 503)
        await wait_for_async(lambda: has_status("a", 200))


async def test_failed_load_is_retried_until_ready(index: Path) -> None:
    broken = threading.Event()
    loads = []

    def load() -> Any:
        loads.append(1)
        if broken.is_set():
            raise RuntimeError("no weights")
        return Embedder()

    async with serving(index, load=load) as client:
        assert (await client.post("/admin/models/hashed/unload")).status_code == 200
        broken.set()
        body = {"query": "a", "mode": "dense"}
        for _ in range(20):
            refused = await client.post("/search", json=body)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
        assert len(loads) < 5  # Not one for each request.
        assert (await client.get("/readyz")).status_code == 503
        broken.clear()
        await wait_for_async(partial(has_status, client, "/readyz", 200))


async def has_status(client: Any, path: str, status: int) -> bool:
    return bool((await client.get(path)).status_code == status)


async def test_hung_load_fails_probes_and_ends_no_search_for_words(index: Path) -> None:
    go_on = threading.Event()

    def load() -> Any:
        assert go_on.wait(600)
        return Embedder()

    options: Any = {"load": load, "hang_timeout": 3, "timeout": 1, "is_ready": False}
    async with serving(index, **options) as client:
        try:
            assert await has_status(client, "/livez", 200)
            assert await has_status(client, "/readyz", 503)
            for mode, status in (("bm25", 200), ("dense", 503)):
                body = {"query": "lease", "mode": mode}
                assert (await client.post("/search", json=body)).status_code == status
            await wait_for_async(partial(has_status, client, "/livez", 503))
            assert await has_status(client, "/readyz", 503)
        finally:
            go_on.set()


@pytest.mark.slow
def test_missing_or_damaged_index_is_found_again(tmp_path: Path) -> None:
    """An open index stays in use, and no response names a folder."""
    index = make_index(tmp_path / "index", [f"{text} {n}" for text in TEXTS for n in range(500)])
    texts: list[str] = []
    with service(index) as started:

        def status_of(*arguments: Any, **more: Any) -> int:
            status, text = started.ask(*arguments, **more)
            texts.append(text)
            return status

        search = {"query": TEXTS[0], "mode": "dense"}
        shutil.rmtree(index)
        assert status_of("/admin/reload", method="POST") == 409
        assert status_of("/search", search) == 200
        assert status_of("/admin/models/index/unload", method="POST") == 200
        assert status_of("/search", search) == status_of("/readyz") == 503
        make_index(index, TEXTS)
        wait_for(lambda: status_of("/search", search) == 200)
        assert started.ask_json("/readyz")["documents"] == len(TEXTS)
        for file in index.iterdir():  # Like a broken disk or an incomplete copy.
            os.truncate(file, file.stat().st_size // 2)
        assert status_of("/admin/reload", method="POST") == 409
        assert status_of("/search", search) in (200, 503)
        assert status_of("/livez") == 200
        shutil.rmtree(index)
        make_index(index, TEXTS)
        assert status_of("/admin/reload", method="POST") == 200
        assert status_of("/search", search) == 200
    assert not [text for text in texts if str(tmp_path) in text]


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
                body = {"query": "a", "top_k": 9, "mode": "dense"}
                answer = await client.post("/search", json=body)
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
        models = (await client.get("/admin/models")).json()["models"]
        assert models[0]["loads"] == 1 < models[1]["loads"]
        assert (counts[0], counts[-1]) == (4, 5)


async def test_changed_model_is_refused(index: Path) -> None:
    """Its vectors could not be compared with those of the index."""
    embedder = Embedder()
    async with serving(index, embedder) as client:
        await client.post("/admin/models/hashed/unload")
        embedder.name = "another"
        assert (await client.post("/search", json={"query": "a"})).status_code == 503
