"""Batches, the limit of the queue, and requests that fail or lose their client."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from support.serving import TEXTS, Embedder, Limits, ask, search, serving
from support.waiting import wait_for_async

CLIENTS = 20


class Gate:
    """Blocks the query "first" until ``open`` is set, so that other queries fill the queue."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, texts: list[str]) -> None:
        if "first" in texts:
            self.entered.set()
            assert self.open.wait(60)


async def post(client: Any, query: str, **more: Any) -> Any:
    return await client.post("/search", json={"query": query, "mode": "dense", **more})


async def wait_for_texts(client: Any, count: int) -> None:
    """Wait until ``count`` texts are in the queue."""

    async def texts_are_waiting() -> bool:
        return f"\nrag_demo_waiting_texts {count}.0\n" in (await client.get("/metrics")).text

    await wait_for_async(texts_are_waiting)


def test_concurrent_requests_share_a_batch(index: Path) -> None:
    """Each gets its own answer. Without batches there is a call for each request."""

    async def main(batch_texts: int) -> tuple[int, list[Any]]:
        gate = Gate()
        embedder = Embedder(gate)
        limits = Limits(batch_texts=batch_texts)
        async with serving(index, embedder, limits=limits) as client:
            first = asyncio.create_task(post(client, "first"))
            await wait_for_async(gate.entered.is_set)
            before = len(embedder.calls)
            others = [
                asyncio.create_task(post(client, TEXTS[n % 4], top_k=1 + n % 3))
                for n in range(CLIENTS)
            ]
            await wait_for_texts(client, CLIENTS)
            gate.open.set()
            answers = await asyncio.gather(*others)
            assert (await first).status_code == 200
            return len(embedder.calls) - before, answers

    for batch_texts, calls in ((64, 1), (1, CLIENTS)):
        made, answers = asyncio.run(main(batch_texts))
        assert made == calls
        for n, answer in enumerate(answers):
            results = answer.json()["results"]
            assert len(results) == 1 + n % 3
            assert results[0]["id"] == str(n % 4)


def test_full_queue_gets_429(index: Path) -> None:

    async def main() -> list[Any]:
        gate = Gate()
        async with serving(index, Embedder(gate), limits=Limits(waiting_texts=3)) as client:
            tasks = [asyncio.create_task(post(client, "first"))]
            await wait_for_async(gate.entered.is_set)
            tasks += [asyncio.create_task(post(client, "a")) for _ in range(3)]
            await wait_for_texts(client, 3)
            refused = await post(client, "a")
            gate.open.set()
            return [refused, *await asyncio.gather(*tasks)]

    refused, *answered = asyncio.run(main())
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in answered] == [200] * 4


def test_failing_request_does_not_fail_its_batch(index: Path) -> None:

    def poisoned(texts: list[str]) -> None:
        gate(texts)
        if "poison" in texts:
            raise RuntimeError("/secret/weights.bin cannot be read")

    gate = Gate()

    async def main() -> list[Any]:
        async with serving(index, Embedder(poisoned)) as client:
            first = asyncio.create_task(post(client, "first"))
            await wait_for_async(gate.entered.is_set)
            tasks = [asyncio.create_task(post(client, each)) for each in ("a", "poison", "b")]
            await wait_for_texts(client, 3)
            gate.open.set()
            return [await first, *await asyncio.gather(*tasks)]

    answers = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [200, 200, 503, 200]
    assert "secret" not in answers[2].text


class Panic(BaseException):
    """Like a panic of pyo3, which is not an Exception."""


@pytest.mark.parametrize("kind", [Panic, SystemExit, KeyboardInterrupt])
def test_base_exception_in_model_gets_503(index: Path, kind: type[BaseException]) -> None:
    """Later requests are answered, and the service stays alive."""

    def poisoned(texts: list[str]) -> None:
        if "poison" in texts:
            raise kind("a panic in the tokenizer")

    async def main() -> list[int]:
        async with serving(index, Embedder(poisoned)) as client:
            answers = [await asyncio.wait_for(post(client, each), 60) for each in ("poison", "a")]
            answers.append(await client.get("/livez"))
            return [answer.status_code for answer in answers]

    assert asyncio.run(main()) == [503, 200, 200]


def test_livez_fails_when_batch_task_ends(index: Path) -> None:
    async def main() -> tuple[int, int]:
        async with serving(index, Embedder()) as client:
            before = (await client.get("/livez")).status_code
            (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "batches"]
            task.cancel()
            await asyncio.wait([task])
            return before, (await client.get("/livez")).status_code

    assert asyncio.run(main()) == (200, 503)


def test_request_past_deadline_gets_503(index: Path) -> None:
    """The model does not get its query."""

    async def main() -> tuple[Any, list[list[str]]]:
        gate = Gate()
        embedder = Embedder(gate)
        async with serving(index, embedder, limits=Limits(answer_s=0.2)) as client:
            first = asyncio.create_task(post(client, "first"))
            await wait_for_async(gate.entered.is_set)
            late = await post(client, "late")
            gate.open.set()
            await first
            await post(client, "after")
            return late, embedder.calls

    late, calls = asyncio.run(main())
    assert late.status_code == 503
    assert "retry-after" in late.headers
    assert ["after"] in calls
    assert ["late"] not in calls


@pytest.mark.parametrize("disconnects", [True, False])
def test_query_of_disconnected_client_is_skipped(index: Path, disconnects: bool) -> None:

    async def main() -> list[list[str]]:
        gate = Gate()
        embedder = Embedder(gate)
        async with serving(index, embedder) as client:
            first = asyncio.create_task(post(client, "first"))
            await wait_for_async(gate.entered.is_set)
            gone = asyncio.Event()
            sent = []
            body = json.dumps({"query": "lost", "mode": "dense"}).encode()
            waiting: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive() -> Any:
                if waiting:
                    return waiting.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {
                "type": "http",
                "http_version": "1.1",
                "method": "POST",
                "path": "/search",
                "raw_path": b"/search",
                "root_path": "",
                "scheme": "http",
                "query_string": b"",
                "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
                "client": ("127.0.0.1", 1),
                "server": ("127.0.0.1", 8000),
            }
            request = asyncio.create_task(client.app(scope, receive, send))
            await wait_for_texts(client, 1)
            if disconnects:
                gone.set()
                await request
                assert sent == []
            gate.open.set()
            await asyncio.gather(first, request)
            await post(client, "after")
            return embedder.calls

    calls = asyncio.run(main())
    assert (["lost"] in calls) is not disconnects


def test_log_line_of_503_has_request_id(index: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(texts: list[str]) -> None:
        if "poison" in texts:
            raise RuntimeError("no weights")

    request = search({"query": "poison", "mode": "dense"}, **{"x-request-id": "trace-1"})
    (answer,) = ask(index, request, embedder=Embedder(fail))
    assert answer.status_code == 503
    lines = [record for record in caplog.records if "no weights" in record.getMessage()]
    assert [record.request_id for record in lines] == ["trace-1"]  # type: ignore[attr-defined]
