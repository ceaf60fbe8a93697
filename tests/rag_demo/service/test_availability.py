"""Calls and loads that hang or fail, and an index that is missing or damaged."""

from __future__ import annotations

import os
import shutil
import threading
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

        async def has_status(status: int) -> bool:
            return bool((await client.get("/readyz")).status_code == status)

        assert await has_status(200)
        assert (await client.post("/admin/models/hashed/unload")).status_code == 200
        broken.set()
        body = {"query": "a", "mode": "dense"}
        for _ in range(20):
            refused = await client.post("/search", json=body)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
        assert len(loads) < 5  # Not one for each request.
        assert await has_status(503)
        body["mode"] = "bm25"  # It needs no model.
        assert (await client.post("/search", json=body)).status_code == 200
        broken.clear()
        await wait_for_async(lambda: has_status(200))


async def test_hung_load_fails_probes_and_ends_no_search_for_words(index: Path) -> None:
    never = threading.Event()
    options: Any = {"load": lambda: never.wait(600), "hang_timeout": 3, "timeout": 5}
    try:
        async with serving(index, **options, is_ready=False) as client:
            for path, status in (("/livez", 200), ("/readyz", 503)):
                assert (await client.get(path)).status_code == status
            for mode, status in (("bm25", 200), ("dense", 503)):
                body = {"query": "lease", "mode": mode}
                assert (await client.post("/search", json=body)).status_code == status
            for path in ("/livez", "/readyz"):
                assert (await client.get(path)).status_code == 503
    finally:
        never.set()


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
        assert status_of("/search", search) == 200
        shutil.rmtree(index)
        assert status_of("/search", search) == 200
        assert status_of("/admin/reload", method="POST") == 409
        assert status_of("/search", search) == 200
        assert status_of("/admin/models/index/unload", method="POST") == 200
        assert status_of("/search", search) == 503
        assert status_of("/readyz") == 503
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
        assert started.stop() == 143
    assert not [text for text in texts if str(tmp_path) in text]
