"""Changes of the index over HTTP: PUT, streams of lines, deletion, and versions."""

import asyncio
import fcntl
import os
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from rag_demo import FaissRetriever
from tests.support.rag_command import succeed
from tests.support.serving import (
    TEXTS,
    Embedder,
    ask,
    make_index,
    metric,
    search,
    serving,
    wait_for_tokens,
)
from tests.support.waiting import wait_for_async

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_index(tmp_path / "index")


def ids_in(folder: Path) -> set[str]:
    """Return the ids of a saved index, as another program reads them."""
    with FaissRetriever(Embedder()) as retriever:
        retriever.load(folder)
        return set(retriever.ids())


def put(*documents: Any) -> Any:
    return "PUT", "/documents", {"json": {"documents": list(documents)}}


def test_put_get_and_delete_a_document(folder: Path) -> None:
    new = {"id": "new", "text": "a zebra", "metadata": {"lang": "en"}}
    (refused,) = ask(folder, put(new))
    added, found, got, ready, deleted, again, gone, by_filter, by_ids, chosen, replaced = ask(
        folder,
        put(new),
        search({"query": "a zebra", "where": {"$not": {"$or": [{"year": {"$gt": 1}}]}}}),
        ("GET", "/documents/new", {}),
        ("GET", "/readyz", {}),
        ("DELETE", "/documents/new", {}),
        ("DELETE", "/documents/new", {}),
        ("GET", "/documents/new", {}),
        ("POST", "/documents/delete", {"json": {"where": {"year": {"$gte": 2002}}}}),
        ("POST", "/documents/delete", {"json": {"ids": ["0", "unknown"]}}),
        put({"text": "first"}, {"text": "second", "metadata": {"year": 1}}),
        put({"id": "1", "text": "instead"}),
        writable=True,
    )
    assert refused.status_code == 403
    assert added.json()["ids"] == ["new"]
    assert added.json()["documents"] == ready.json()["documents"] == len(TEXTS) + 1
    versions = {added.json()["index_version"], found.headers["x-index-version"]}
    assert versions == {ready.json()["index_version"]} != {deleted.json()["index_version"]}
    assert [each["id"] for each in found.json()["results"]] == ["new"]
    assert (got.json()["text"], got.json()["metadata"]) == ("a zebra", {"lang": "en"})
    assert (deleted.status_code, again.status_code, gone.status_code) == (200, 404, 404)
    assert (by_filter.json()["deleted"], by_ids.json()["deleted"]) == (2, 1)
    assert replaced.json()["documents"] == 3
    assert len({"1", *chosen.json()["ids"]}) == 3
    assert ids_in(folder) == {"1", *chosen.json()["ids"]}


def test_invalid_documents_change_nothing(folder: Path) -> None:
    wrong = '{"documents": [{"id": "n", "text": "n", "metadata": {"a": NaN}}]}'
    answers = ask(
        folder,
        put({"id": "a", "text": "a"}, {"text": "b"}),
        ("PUT", "/documents", {"content": wrong, "headers": {"content-type": "application/json"}}),
        put({"id": "a", "text": "a"}, {"id": "a", "text": "b"}),
        put({"id": "a", "text": ""}),
        put(),
        put({"id": "a", "text": "a", "more": 1}),
        ("POST", "/documents/delete", {"json": {}}),
        ("POST", "/documents/delete", {"json": {"where": {}}}),
        writable=True,
    )
    assert [each.status_code for each in answers] == [422] * 8
    assert "give one to all or to none" in answers[0].json()["detail"]
    assert ids_in(folder) == {"0", "1", "2", "3"}


class Held(Embedder):
    """Holds the first embedding of texts that begin with "word" until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.first_words: list[str] = []
        self.entered, self.may_go_on = threading.Event(), threading.Event()

    def embed_documents(self, texts: Any) -> Any:
        self.first_words.append(texts[0].split()[0])
        if self.first_words[-1] == "word" and not self.entered.is_set():
            self.entered.set()
            assert self.may_go_on.wait(60)
        return super().embed_documents(texts)


async def test_searches_are_answered_during_a_large_change(folder: Path) -> None:
    """By words at once, by meaning before the next part of the change is embedded."""
    model = Held()
    async with serving(folder, model, writable=True) as client:
        documents = [{"id": f"n{n}", "text": "word " * 100} for n in range(300)]
        change = asyncio.create_task(client.put("/documents", json={"documents": documents}))
        await wait_for_async(model.entered.is_set)
        body = {"query": "lease", "mode": "bm25"}
        assert (await client.post("/search", json=body)).status_code == 200
        before = await metric(client, "rag_demo_waiting_tokens")
        body["mode"] = "dense"
        search = asyncio.create_task(client.post("/search", json=body))
        await wait_for_tokens(client, lambda tokens: tokens > before)
        model.may_go_on.set()
        assert {(await each).status_code for each in (search, change)} == {200}
    assert model.first_words[:3] == ["word", "lease", "word"]


async def test_change_has_a_deadline_and_its_late_vectors_change_nothing(folder: Path) -> None:
    model = Held()
    async with serving(folder, model, writable=True, timeout=2.0) as client:
        body = {"documents": [{"id": "new", "text": "word"}]}
        assert (await client.put("/documents", json=body)).status_code == 504
        assert model.entered.is_set()
        model.may_go_on.set()
        await client.post("/search", json={"query": "a", "mode": "dense"})
    assert ids_in(folder) == {"0", "1", "2", "3"}


async def test_changes_of_another_program_are_seen_and_kept(folder: Path) -> None:
    async with serving(folder, writable=True) as client:
        await asyncio.to_thread(make_index, folder, [*TEXTS, "a giraffe"])
        answer = await client.post("/search", json={"query": "a giraffe", "top_k": 1})
        assert [each["text"] for each in answer.json()["results"]] == ["a giraffe"]
        assert (await client.get("/documents/4")).json()["text"] == "a giraffe"
        assert (await client.get("/readyz")).json()["documents"] == 5
        await asyncio.to_thread(make_index, folder, [*TEXTS, "a giraffe", "a lion"])
        method, path, options = put({"id": "new", "text": "new"})
        answer = await client.request(method, path, **options)
        assert answer.json()["documents"] == len(TEXTS) + 3, answer.text
    assert ids_in(folder) == {"0", "1", "2", "3", "4", "5", "new"}


def test_change_waits_for_another_program_that_is_writing(folder: Path) -> None:
    """At its deadline it is refused."""
    document = put({"id": "new", "text": "a zebra"})
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # As the program that is writing.
    (refused,) = ask(folder, document, writable=True, timeout=2)
    assert refused.status_code in (503, 504)  # A busy machine reaches the deadline earlier.
    assert refused.headers["retry-after"] == "5"
    if refused.status_code == 503:
        assert refused.json()["detail"] == "another process is changing the index"
    assert "new" not in ids_in(folder)
    timer = threading.Timer(0.5, os.close, (descriptor,))
    timer.start()
    (added,) = ask(folder, document, writable=True)
    timer.join()
    assert added.status_code == 200
    assert "new" in ids_in(folder)


async def test_service_follows_the_link_to_the_newest_snapshot(
    folder: Path, tmp_path: Path
) -> None:
    """Earlier snapshots stay as they were."""
    snapshots = tmp_path / "snapshots"
    succeed("snapshot", folder, "--to", snapshots)
    async with serving(snapshots / "latest") as client:
        assert (await client.get("/readyz")).json()["documents"] == len(TEXTS)
        await asyncio.to_thread(make_index, folder, [*TEXTS, "a new one"])
        succeed("snapshot", folder, "--to", snapshots)  # It sets signals: not in a thread.
        answer = await client.post("/search", json={"query": "a", "top_k": 9, "mode": "dense"})
        assert len(answer.json()["results"]) == len(TEXTS) + 1
    assert sorted(each.name for each in snapshots.iterdir()) == ["000001", "000002", "latest"]
    assert [len(ids_in(snapshots / name)) for name in ("000001", "000002")] == [4, 5]


def test_ids_may_have_any_characters(folder: Path) -> None:
    """A path with a newline at its end names another document than the one without."""
    names = ["note", "note\n", "\nnote", "a\nb", "a/b", "a b", "x?y#z", "ä\r\n"]
    paths = [f"/documents/{quote(name, safe='')}" for name in names]
    added, *found, deleted, kept, gone, model = ask(
        folder,
        put(*({"id": name, "text": f"text {n}"} for n, name in enumerate(names))),
        *(("GET", path, {}) for path in paths),
        ("DELETE", paths[1], {}),
        ("GET", paths[0], {}),
        ("GET", paths[1], {}),
        ("POST", "/admin/models/hashed%0A/unload", {}),
        writable=True,
    )
    assert [each.json()["id"] for each in found] == names
    statuses = [each.status_code for each in (added, deleted, kept, gone, model)]
    assert statuses == [200, 200, 200, 404, 404]
    assert ids_in(folder) == {"0", "1", "2", "3", *names} - {names[1]}


def test_documents_are_listed_page_by_page(folder: Path) -> None:
    pages = ({"limit": 3}, {"limit": 3, "after": "2"}, {"limit": 0}, {"limit": 5000})
    first, last, *wrong = ask(folder, *(("GET", "/documents", {"params": page}) for page in pages))
    found = [*first.json()["documents"], *last.json()["documents"]]
    assert [(each["id"], each["text"]) for each in found] == [
        (str(n), text) for n, text in enumerate(TEXTS)
    ]
    assert found[1]["metadata"]["year"] == 2001
    assert (first.json()["next"], last.json()["next"]) == ("2", None)
    assert [each.status_code for each in wrong] == [422, 413]
    assert wrong[0].json()["detail"].startswith("#/limit: ")  # Not a word about a body.


def test_bad_vector_of_the_model_is_an_error_everywhere(folder: Path) -> None:
    class Bad(Embedder):
        def embed_documents(self, texts: Any) -> Any:
            vectors = super().embed_documents(texts)
            vectors[["bad" in text for text in texts]] = np.nan
            return vectors

    answers = ask(
        folder,
        ("POST", "/v1/embeddings", {"json": {"input": ["bad"]}}),
        ("POST", "/embed", {"json": {"inputs": "bad"}}),
        put({"id": "new", "text": "bad"}),
        load=Bad,
        writable=True,
    )
    assert [each.status_code for each in answers] == [503, 424, 503]
    assert "new" not in ids_in(folder)
