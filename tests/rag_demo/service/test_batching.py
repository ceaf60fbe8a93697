"""Many clients at once: batches, a queue with an end, and clients that pay for themselves only."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from support.serving import TEXTS, Embedder, Limits, serving
from support.waiting import wait_for_async

CLIENTS = 20


class Gate:
    """Holds up the first question, until it is opened, so that the others gather."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, texts: list[str]) -> None:
        if "first" in texts:
            self.entered.set()
            assert self.opened.wait(60)


async def post(client: Any, query: str, **more: Any) -> Any:
    return await client.post("/search", json={"query": query, "mode": "dense", **more})


async def wait_for_texts(client: Any, count: int) -> None:
    """Wait until so many texts are in the queue."""

    async def texts_are_waiting() -> bool:
        return f"\nrag_demo_waiting_texts {count}.0\n" in (await client.get("/metrics")).text

    await wait_for_async(texts_are_waiting)


def test_concurrent_requests_are_embedded_together(index: Path) -> None:
    """However they differ, each gets its own answer. One by one is the control."""

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
            gate.opened.set()
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


def test_a_full_queue_refuses(index: Path) -> None:
    """With 429 and when to come again; what was let in is answered."""

    async def main() -> list[Any]:
        gate = Gate()
        async with serving(index, Embedder(gate), limits=Limits(waiting_texts=3)) as client:
            tasks = [asyncio.create_task(post(client, "first"))]
            await wait_for_async(gate.entered.is_set)
            tasks += [asyncio.create_task(post(client, "a")) for _ in range(3)]
            await wait_for_texts(client, 3)
            refused = await post(client, "a")
            gate.opened.set()
            return [refused, *await asyncio.gather(*tasks)]

    refused, *answered = asyncio.run(main())
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in answered] == [200] * 4


def test_a_bad_neighbour_harms_nobody(index: Path) -> None:
    """What fails together is tried one by one; the failure's text is not told."""

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
            gate.opened.set()
            return [await first, *await asyncio.gather(*tasks)]

    answers = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [200, 200, 503, 200]
    assert "secret" not in answers[2].text


class Panic(BaseException):
    """As pyo3 has it, whose panics are no Exceptions."""


@pytest.mark.parametrize("kind", [Panic, SystemExit, KeyboardInterrupt])
def test_what_is_no_exception_ends_no_work(index: Path, kind: type[BaseException]) -> None:
    """The one who asked is answered, so are all who come later; and the service is alive."""

    def poisoned(texts: list[str]) -> None:
        if "poison" in texts:
            raise kind("a panic in the tokenizer")

    async def main() -> list[int]:
        async with serving(index, Embedder(poisoned)) as client:
            answers = [await asyncio.wait_for(post(client, each), 60) for each in ("poison", "a")]
            answers.append(await client.get("/livez"))
            return [answer.status_code for answer in answers]

    assert asyncio.run(main()) == [503, 200, 200]


def test_a_service_that_works_no_more_is_not_alive(index: Path) -> None:
    async def main() -> tuple[int, int]:
        async with serving(index, Embedder()) as client:
            before = (await client.get("/livez")).status_code
            (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "batches"]
            task.cancel()
            await asyncio.wait([task])
            return before, (await client.get("/livez")).status_code

    assert asyncio.run(main()) == (200, 503)


def test_a_time_limit(index: Path) -> None:
    """Who has waited for too long is told so; the question is not asked any more."""

    async def main() -> tuple[Any, list[list[str]]]:
        gate = Gate()
        embedder = Embedder(gate)
        async with serving(index, embedder, limits=Limits(answer_s=0.2)) as client:
            first = asyncio.create_task(post(client, "first"))
            await wait_for_async(gate.entered.is_set)
            late = await post(client, "late")
            gate.opened.set()
            await first
            await post(client, "after")
            return late, embedder.calls

    late, calls = asyncio.run(main())
    assert late.status_code == 503
    assert "retry-after" in late.headers
    assert ["after"] in calls
    assert ["late"] not in calls


@pytest.mark.parametrize("goes_away", [True, False])
def test_a_client_that_goes_away_costs_nothing_more(index: Path, goes_away: bool) -> None:
    """Its question is never asked; that of one who stays, the control, is."""

    async def main() -> list[list[str]]:
        gate = Gate()
        embedder = Embedder(gate)
        async with serving(index, embedder) as client:
            first = asyncio.create_task(post(client, "first"))
            await wait_for_async(gate.entered.is_set)
            gone = asyncio.Event()
            sent = []
            body = json.dumps({"query": "who is there?", "mode": "dense"}).encode()
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
            asked = asyncio.create_task(client.app(scope, receive, send))
            await wait_for_texts(client, 1)
            if goes_away:
                gone.set()
                await asked
                assert sent == []
            gate.opened.set()
            await asyncio.gather(first, asked)
            await post(client, "after")
            return embedder.calls

    calls = asyncio.run(main())
    assert (["who is there?"] in calls) is not goes_away
