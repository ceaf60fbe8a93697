"""Batches, admission, and requests that fail or lose their client."""

import asyncio
import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rag_demo.errors import PostgresError
from tests.support.serving import TEXTS, Embedder, metric, serving, wait_for_tokens
from tests.support.waiting import wait_for_async

pytestmark = pytest.mark.anyio

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


async def wait_for_texts(client: Any, *texts: str) -> None:
    """Wait until these texts are in the model's queue."""
    wanted = sum(2 + len(text) // 3 for text in texts)
    await wait_for_tokens(client, lambda tokens: tokens == wanted)


async def post_together(client: Any, gate: Gate, *queries: str, **more: Any) -> list[Any]:
    """Post queries that wait together while the model is busy; return their answers."""
    first = asyncio.create_task(post(client, "first"))
    await wait_for_async(gate.entered.is_set)
    tasks = [asyncio.create_task(post(client, query, **more)) for query in queries]
    await wait_for_texts(client, *queries)
    gate.open.set()
    assert (await first).status_code == 200
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize(("batch_tokens", "is_shared"), [(16_384, True), (1, False)])
async def test_concurrent_requests_share_a_batch(
    index: Path, batch_tokens: int, is_shared: bool
) -> None:
    """Each gets its own answer. Without batches there is a call for each request."""
    gate = Gate()
    embedder = Embedder(gate)
    async with serving(index, embedder, batch_tokens=batch_tokens) as client:
        answers = await post_together(client, gate, *(TEXTS[n % 4] for n in range(CLIENTS)))
    assert (len(embedder.calls) < CLIENTS) == is_shared
    assert [each.json()["results"][0]["id"] for each in answers] == [
        str(n % 4) for n in range(CLIENTS)
    ]


async def test_full_queue_gets_429(index: Path) -> None:
    """The requests that wait are answered. Bulk and small requests do not keep each other out."""
    gate = Gate()
    async with serving(index, Embedder(gate), max_waiting_tokens=60) as client:
        first = asyncio.create_task(post(client, "first"))
        await wait_for_async(gate.entered.is_set)
        texts = {"inputs": ["word " * 150] * 40}  # More than may wait, but the only one.
        bulk = [asyncio.create_task(client.post("/embed", json=texts)) for _ in range(2)]
        small = [asyncio.create_task(post(client, f"q {n:02}")) for n in range(100)]
        await wait_for_async(lambda: sum(each.done() for each in [*bulk, *small]) == 81)
        gate.open.set()
        answers = await asyncio.gather(*bulk, *small, first)
    assert Counter(each.status_code for each in answers[:2]) == {200: 1, 429: 1}
    assert Counter(each.status_code for each in answers[2:]) == {200: 21, 429: 80}
    assert all("retry-after" in each.headers for each in answers if each.status_code == 429)


class Slow(Embedder):
    """Takes some time for each document."""

    documents = 0

    def embed_documents(self, texts: Any) -> Any:
        self.documents += len(texts)
        time.sleep(0.01 * len(texts))
        return super().embed_documents(texts)


async def test_request_that_takes_long_is_alive_and_not_computed_after_its_deadline(
    index: Path,
) -> None:
    """It takes longer than a call that hangs. A later request that can be finished is."""
    model = Slow()
    async with serving(index, model, timeout=3, hang_timeout=1.5) as client:

        def embed(count: int) -> Any:
            return client.post("/embed", json={"inputs": ["word " * 150] * count})

        large = asyncio.create_task(embed(2_000))
        alive = set()
        while not large.done():
            alive.add((await client.get("/livez")).status_code)
            await asyncio.sleep(0.05)
        assert (large.result().status_code, alive) == (504, {200})
        assert (await embed(20)).status_code == 200
    assert model.documents < 1_000


async def test_bulk_reaches_the_model_in_whole_batches(index: Path) -> None:
    """The model says how many tokens keep its device busy, and it cannot count tokens."""

    class GpuLike(Embedder):
        batch_tokens, max_tokens = 32_768, 256

    async with serving(index, GpuLike()) as client:
        before = await metric(client, "rag_demo_batch_tokens_count")
        answer = await client.post("/embed", json={"inputs": ["word " * 60] * 320})
        assert answer.status_code == 200, answer.text
        # 320 texts have 32,640 tokens.
        assert await metric(client, "rag_demo_batch_tokens_count") == before + 1


async def test_unreachable_database_fails_a_whole_batch(
    index: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked once for each batch, and the log has one line for it, without a traceback."""
    gate = Gate()
    calls: list[int] = []

    def unreachable(texts: list[str]) -> None:
        gate(texts)
        if "first" not in texts:
            calls.append(len(texts))
            raise PostgresError("the database cannot answer now; try again")

    with caplog.at_level("ERROR", "rag_demo.service"):
        async with serving(index, Embedder(unreachable)) as client:
            answers = await post_together(client, gate, *(f"query {n}" for n in range(8)))
    assert [each.status_code for each in answers] == [503] * 8
    assert all("retry-after" in each.headers for each in answers)
    assert sum(calls) == 8  # Not again one by one.
    assert [record.exc_info for record in caplog.records] == [None] * len(calls)


class Panic(BaseException):
    """Like a panic of pyo3, which is not an Exception."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
async def test_failing_request_does_not_fail_its_batch(
    index: Path, kind: type[BaseException]
) -> None:
    gate = Gate()

    def poisoned(texts: list[str]) -> None:
        gate(texts)
        if "poison" in texts:
            raise kind("/secret/weights.bin cannot be read")

    async with serving(index, Embedder(poisoned)) as client:
        answers = await post_together(client, gate, "a", "poison", "b")
        answers += [await post(client, "after"), await client.get("/livez")]
    assert [answer.status_code for answer in answers] == [200, 503, 200, 200, 200]
    assert "secret" not in answers[1].text


async def test_query_of_disconnected_client_is_skipped(index: Path) -> None:
    gate = Gate()
    embedder = Embedder(gate)
    async with serving(index, embedder) as client:
        first = asyncio.create_task(post(client, "first"))
        await wait_for_async(gate.entered.is_set)
        body = json.dumps({"query": "lost", "mode": "dense"}).encode()
        messages: asyncio.Queue[Any] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body})
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/search"}
        scope |= {"headers": headers, "query_string": b""}
        request = asyncio.create_task(client.app(scope, messages.get, pytest.fail))
        await wait_for_texts(client, "lost")
        messages.put_nowait({"type": "http.disconnect"})
        await request
        gate.open.set()
        await first
        await post(client, "after")
    assert ["lost"] not in embedder.calls and ["after"] in embedder.calls
