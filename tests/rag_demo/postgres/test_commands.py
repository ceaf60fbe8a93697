"""Commands take a URL wherever they take a folder, and the service serves it."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psycopg", reason="psycopg is not installed: see CONTRIBUTING.md")
from rag_demo import PgVectorRetriever
from tests.support.postgres_server import PASSWORD, PostgresServer
from tests.support.rag_command import fail, info, rag_demo, search, succeed, texts, write_lines
from tests.support.serving import TEXTS, Embedder, serving
from tests.support.waiting import wait_for_async

pytestmark = pytest.mark.anyio


@pytest.fixture
def url(server: PostgresServer, table: str) -> str:
    return f"{server.url}?table={table}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "one.md").write_text("# One\n\nAbout memory that is given back.\n")
    (folder / "two.md").write_text("# Two\n\nAbout apples and pears.\n")
    return folder


def test_commands_use_a_database_as_a_folder(
    url: str, source: Path, tmp_path: Path, tiny_model: Path
) -> None:
    """What they print never has the password."""
    printed: list[str] = []

    def use(*arguments: str | Path) -> str:
        printed.append(succeed(*arguments))
        return printed[-1]

    model = ("--model", tiny_model)
    assert "indexed 2 texts" in use("index", source, "--out", url, *model)
    succeed("index", source, "--out", tmp_path / "folder", *model)
    for mode in ("dense", "bm25", "hybrid"):
        (here,), (there,) = (
            search(place, "apples", "--mode", mode) for place in (url, tmp_path / "folder")
        )
        ids = [[each["id"] for each in found["results"]] for found in (here, there)]
        assert ids[0] == ids[1], mode
    (source / "two.md").unlink()
    (source / "three.md").write_text("# Three\n\nAbout boats.\n")
    assert "1 of them unchanged" in use("index", source, "--out", url, *model)
    facts = info(url)
    assert (facts["texts"], facts["finished"], facts["source"]) == (2, True, str(source))
    lines = write_lines(tmp_path / "lines.jsonl", [{"id": "x", "text": "a line", "year": 1999}])
    assert "3 texts, 2 before" in use("add", url, lines)
    assert "deleted 1 text from" in use("delete", url, "--where", "year<2000")
    assert len(texts(url)) == 2
    warned = rag_demo("delete", url, "unknown", "--where", "yeer=3").stderr
    assert "no document has the metadata key 'yeer'" in warned
    for advice, *command in (("pg_amcheck", "verify"), ("pg_dump", "snapshot", "--to", "x")):
        printed.append(fail(command[0], url, *command[1:]))
        assert advice in printed[-1]
    assert PASSWORD not in warned + json.dumps(facts) + "".join(printed)


@pytest.fixture
def filled(server: PostgresServer, table: str) -> Any:
    """An index of TEXTS in a database."""
    with PgVectorRetriever(Embedder(), server.url, table) as retriever:
        retriever.add(TEXTS)
    return f"{server.url}?table={table}"


async def test_changes_of_every_program_are_seen_at_once(filled: Any) -> None:
    async with serving(filled, writable=True) as client, serving(filled) as replica:
        body = {"documents": [{"id": "new", "text": "a zebra", "metadata": {"year": 1}}]}
        assert (await client.put("/documents", json=body)).json()["documents"] == 5
        with PgVectorRetriever(Embedder(), filled) as other:
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
    server: PostgresServer, filled: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No response, no log and no metric has the password."""
    texts: list[str] = []
    async with serving(filled, writable=True) as client:

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
