"""Administration: what is loaded, giving it back, and a new index while the old one answers."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from support.serving import TEXTS, Embedder, ask, make_index, serving
from support.waiting import wait_for_async


def test_models_are_shown_and_given_back(index: Path) -> None:
    """With the report of what came back; the next question loads them again."""

    async def main() -> None:
        async with serving(index) as client:

            async def states() -> dict[str, str]:
                models = (await client.get("/admin/models")).json()["models"]
                assert {"name", "model", "size", "expires_at"} <= set(models[0])
                return {each["name"]: each["state"] for each in models}

            assert await states() == {"hashed": "loaded", "index": "loaded"}
            for name in ("hashed", "index"):
                report = (await client.post(f"/admin/models/{name}/unload")).json()
                assert {"freed_bytes", "still_held", "duration_s", "summary"} <= set(report)
            assert report["freed_bytes"]["host"] > 0
            assert await states() == {"hashed": "unloaded", "index": "unloaded"}
            assert (await client.get("/readyz")).status_code == 200
            answer = await client.post("/search", json={"query": TEXTS[0], "mode": "dense"})
            assert answer.json()["results"][0]["id"] == "0"
            assert await states() == {"hashed": "loaded", "index": "loaded"}
            unknown = await client.post("/admin/models/other/unload")
            assert unknown.status_code == 404
            events = (await client.get("/memory")).json()["events"]
            assert {each["what"] for each in events} >= {"load", "unload"}

    asyncio.run(main())


def test_a_model_in_a_folder_named_index_is_not_the_index(index: Path) -> None:
    """Both are shown, and can be given back."""
    (shown,) = ask(index, ("GET", "/admin/models", {}), model="somewhere/index")
    assert [each["name"] for each in shown.json()["models"]] == ["model", "index"]


def test_answers_say_whose_they_are(index: Path) -> None:
    """Each of several processes has a model and an index of its own."""
    shown, unloaded, reloaded = ask(
        index,
        ("GET", "/admin/models", {}),
        ("POST", "/admin/models/index/unload", {}),
        ("POST", "/admin/reload", {}),
        workers=3,
    )
    for answer in (shown, unloaded, reloaded):
        assert (answer.json()["process"], answer.json()["workers"]) == (os.getpid(), 3)
    assert "one of 3 processes" in unloaded.json()["summary"]


def test_reload_fails_no_request(tmp_path: Path) -> None:
    """The old index answers until the new one is ready; afterwards the new one does."""
    folder = make_index(tmp_path / "index")

    async def main() -> None:
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
            await asyncio.to_thread(make_index, folder, [*TEXTS, "and a new one"])
            report = await client.post("/admin/reload")
            after = len(counts)
            await wait_for_async(lambda: len(counts) >= after + 5)
            done.set()
            await asyncio.gather(*clients)
            assert report.json()["documents"] == 5
            metrics = (await client.get("/metrics")).text
            assert 'torch_utils_model_loaded{model="index"} 1.0' in metrics
            assert set(counts[:1]) == {4}
            assert counts[-1] == 5

    asyncio.run(main())


def test_a_model_that_changed_is_found(index: Path) -> None:
    """One that is loaded again as another must not answer for the old one's vectors."""
    embedder = Embedder()

    async def main() -> list[int]:
        async with serving(index, embedder) as client:
            found = [(await client.post("/search", json={"query": "a"})).status_code]
            await client.post("/admin/models/hashed/unload")
            embedder.name = "another"
            found.append((await client.post("/search", json={"query": "a"})).status_code)
            return found

    assert asyncio.run(main()) == [200, 503]


@pytest.mark.parametrize(
    ("client", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("127.0.0.1", {"origin": "http://127.0.0.1:8000"}, 200),
        ("127.0.0.1", {"origin": "http://evil.example"}, 403),
        ("127.0.0.1", {"origin": "null"}, 403),
        ("127.0.0.1", {"sec-fetch-site": "same-site"}, 403),
        ("127.0.0.1", {"sec-fetch-site": "same-origin"}, 200),
        ("127.0.0.1", {"x-forwarded-for": "203.0.113.5"}, 403),
        ("127.0.0.1", {"x-forwarded-host": "a"}, 403),
        ("127.0.0.1", {"forwarded": "a"}, 403),
        ("127.0.0.1", {"via": "a"}, 403),
        ("203.0.113.5", {}, 403),
        ("::ffff:127.0.0.1", {}, 200),
        ("::ffff:203.0.113.5", {}, 403),
    ],
)
def test_who_may_administer(index: Path, client: str, headers: Any, status: int) -> None:
    """This machine itself, neither a proxy nor a page of another site on it."""

    async def main() -> int:
        async with serving(index, client=client) as http:
            return (await http.post("/admin/reload", headers=headers)).status_code

    assert asyncio.run(main()) == status


def test_requests_during_an_unload_wait(index: Path) -> None:
    """They are answered after it, by a model that is loaded again."""
    threads: set[str] = set()
    embedder = Embedder(lambda texts: threads.add(threading.current_thread().name))

    async def main() -> list[int]:
        async with serving(index, embedder) as client:
            asked = [client.post("/search", json={"query": f"q{n}"}) for n in range(10)]
            unloaded = [client.post("/admin/models/hashed/unload") for _ in range(3)]
            return [each.status_code for each in await asyncio.gather(*asked, *unloaded)]

    assert set(asyncio.run(main())) == {200}


def test_the_log_ends_with_what_was_given_back(
    index: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it was, as its last line."""
    with caplog.at_level("INFO", "rag_demo.service"):
        ask(index)
    assert caplog.messages[-1] == "stopped: the model and the index were given back"


def test_reload_keeps_the_model(index: Path) -> None:
    """Only the index is opened anew: a model that fills half of a device could not load twice."""

    async def main() -> None:
        async with serving(index) as client:
            for _ in range(3):
                assert (await client.post("/admin/reload")).status_code == 200
            events = (await client.get("/memory")).json()["events"]
            loads = [each for each in events if each["what"] == "load"]
            assert [each["model"] for each in loads].count("hashed") <= 1, events
            answer = await client.post("/search", json={"query": TEXTS[0], "mode": "dense"})
            assert answer.json()["results"][0]["id"] == "0"

    asyncio.run(main())
