"""The service over an index in a database."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("psycopg", reason="psycopg is not installed: see CONTRIBUTING.md")
from rag_demo import PgVectorRetriever
from tests.support.postgres_server import PASSWORD, PostgresServer
from tests.support.serving import TEXTS, Embedder, serving
from tests.support.waiting import wait_for_async

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(server: PostgresServer, table: str) -> Any:
    """An index of TEXTS in a database."""
    with PgVectorRetriever(Embedder(), server.url, table) as retriever:
        retriever.add(TEXTS)
    return f"{server.url}?table={table}"


async def test_changes_of_every_program_are_seen_at_once(url: Any) -> None:
    async with serving(url, writable=True) as client, serving(url) as replica:
        body = {"documents": [{"id": "new", "text": "a zebra", "metadata": {"year": 1}}]}
        assert (await client.put("/documents", json=body)).json()["documents"] == 5
        with PgVectorRetriever(Embedder(), url) as other:
            other.add(["a giraffe"], ids=["other"])
        for query, name in (("a zebra", "new"), ("a giraffe", "other")):
            answer = await replica.post("/search", json={"query": query, "top_k": 1})
            assert [each["id"] for each in answer.json()["results"]] == [name]
        assert (await replica.get("/readyz")).json()["documents"] == 6
        gone = await client.post("/documents/delete", json={"where": {"year": 1}})
        assert gone.json()["deleted"] == 1
        wrong = await replica.post("/search", json={"query": "a", "where": {"a": "\0"}})
        assert wrong.status_code == 422


async def test_server_that_stops_gives_503_until_it_is_back(
    server: PostgresServer, url: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No response, no log and no metric has the password."""
    texts: list[str] = []
    async with serving(url, writable=True) as client:

        async def statuses() -> list[int]:
            document: Any = {"id": "n", "text": "n"}
            answers = [
                await client.post("/search", json={"query": "a", "mode": "bm25"}),
                await client.post("/search", json={"query": "a", "mode": "dense"}),
                await client.put("/documents", json={"documents": [document]}),
                await client.get("/documents/0"),
                await client.get("/readyz"),
                await client.get("/livez"),
                await client.get("/metrics"),
            ]
            texts.extend(each.text for each in answers)
            return [each.status_code for each in answers]

        assert await statuses() == [200] * 7
        server.stop()
        try:
            assert await statuses() == [503] * 5 + [200] * 2
        finally:
            server.start()

        async def works() -> bool:
            return await statuses() == [200] * 7

        await wait_for_async(works)
    assert "the database cannot be reached" in "".join(texts)
    assert PASSWORD not in "".join(texts) + caplog.text
