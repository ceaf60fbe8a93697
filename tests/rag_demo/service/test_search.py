"""Search requests: answers, refusals, limits, and what responses must not contain."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rag_demo import FaissRetriever
from tests.support.serving import TEXTS, Embedder, ask, search, serving

pytestmark = pytest.mark.anyio


def test_search_returns_the_retrievers_results(index: Path) -> None:
    """In every mode, with filters and thresholds, for one query and for several."""
    bodies: list[dict[str, Any]] = [
        {"query": "memory", "top_k": 3, "mode": mode} | more
        for mode in ("dense", "bm25", "hybrid")
        for more in ({}, {"where": {"year": {"$gte": 2001}}}, {"min_score": 0.02})
    ]
    *single, several = ask(
        index,
        *map(search, bodies),
        search({"queries": ["lease", "index"], "mode": "dense", "include_text": False}),
    )
    with FaissRetriever(Embedder()) as retriever:
        retriever.load(index)
        for body, answer in zip(bodies, single, strict=True):
            expected = retriever.search(**body)
            found = answer.json()["results"]
            assert [(each["id"], each["rank"], each["text"]) for each in found] == [
                (each.id, each.rank, each.text) for each in expected
            ]
            scores = [each.score for each in expected]
            assert [each["score"] for each in found] == pytest.approx(scores)
        batches = retriever.search_batch(["lease", "index"], mode="dense")
    found = several.json()["batches"]
    assert not any("text" in each for its in found for each in its)
    assert [[each["id"] for each in its] for its in found] == [
        [each.id for each in its] for its in batches
    ]


def test_scores_tell_what_they_are_made_from(index: Path) -> None:
    """With a threshold they are cosines: fused scores cannot be compared with one."""
    hybrid, dense = ask(
        index, search({"query": TEXTS[0]}), search({"query": TEXTS[0], "min_score": 0.99})
    )
    best = hybrid.json()["results"][0]
    assert set(best["scores"]) == {"dense", "bm25"}
    assert best["score"] < 0.5 < 0.99 < best["scores"]["dense"]
    assert [each["id"] for each in dense.json()["results"]] == ["0"]


DEEP: Any = {"a": 1}
for _ in range(60):
    DEEP = {"$not": DEEP}
NOT_JSON = "the body is not valid JSON"
REFUSED: list[tuple[Any, int, str]] = [
    ({}, 422, "#: exactly one of"),
    ({"query": "a", "queries": ["a"]}, 422, "#: exactly one of"),
    ({"query": "a", "mode": "hybrid", "min_score": 0.5}, 422, "use mode='dense'"),
    ({"query": 1}, 422, "#/query: Input should be a valid string"),
    ({"query": "  "}, 422, "#/query: "),
    ({"query": "x" * 8001}, 413, "2,669 tokens in a query"),
    ({"query": 'say "yes" ' * 200_000}, 413, "tokens in a query"),  # Its quotes do not count.
    ({"queries": ["x"] * 257}, 413, "257 queries"),
    ({"queries": ["x"] * 5_001}, 413, "more than 5,000 items"),
    ({"query": "a", "top_k": 0}, 422, "#/top_k: "),
    ({"query": "a", "top_k": 10**400}, 413, "results"),
    ({"query": "a", "mode": "best"}, 422, "#/mode: "),
    ({"query": "a", "neighbors": 11}, 422, "#/neighbors: "),
    ({"query": "a", "topk": 1}, 422, "#: the field 'topk' is unknown"),
    ({"query": "a", **dict.fromkeys(map(str, range(10_000)))}, 422, "the field '0' is unknown"),
    ({"query": "a", "where": 1}, 422, "#/where: Input should be a valid dictionary"),
    ({"query": "a", "where": DEEP}, 422, "nested more than 50 deep"),
    ({"query": "a", "where": {"a": list(range(20_000))}}, 422, "at most 65,536 bytes"),
    ({"query": "a", "where": {"a": 10**400}}, 422, "#/where: "),
    ({"query": "a", "where": {"a": {"$gt": []}}}, 422, "#/where: $gt in where must have"),
    ({"query": "a", "where": {"$foo": 1}}, 422, "unknown operator '$foo'"),
    ({"query": "a", "where": {"$or": [{"n": 1}] * 65}}, 422, "at most 64 conditions, got 65"),
    (b"", 422, "#: Field required"),
    (b"1", 422, "#: Input should be a valid dictionary"),
    (b"{", 400, NOT_JSON),
    (b"\xff\xfe", 400, NOT_JSON),
    (b"[" * 100_000, 400, NOT_JSON),  # Python 3.14 reads so many levels, if they are closed.
    (b'{"query": ' + b"9" * 6_000 + b"}", 400, NOT_JSON),
    (b'{"query": "a", "min_score": NaN}', 422, "#/min_score: Input should be a finite number"),
    (b'{"query": "a", "where": {"a": Infinity}}', 422, "#/where: must have finite numbers"),
    (b'{"query": "\\ud800"}', 422, "#/query: "),
    (b'{"queries": [' + b"[]," * 300_000, 413, "too many strings, lists and objects"),
]


def post(body: Any) -> Any:
    if isinstance(body, bytes):
        return "POST", "/search", {"content": body, "headers": {"content-type": "application/json"}}
    return search(body)


def test_refused_searches_get_problem_details(index: Path) -> None:
    """They say what is wrong, and point to it. What is at a limit is answered."""
    fine = {"query": "a", "where": {"$or": [{"n": 1}] * 64}}
    *answers, control = ask(index, *(post(body) for body, _, _ in REFUSED), search(fine))
    assert control.status_code == 200
    for (body, status, detail), answer in zip(REFUSED, answers, strict=True):
        problem = answer.json()
        assert (answer.status_code, problem["status"]) == (status, status), body
        assert detail in problem["detail"] and problem["title"], body
        assert answer.headers["content-type"] == "application/problem+json"
        assert problem["request_id"] == answer.headers["x-request-id"]
        assert len(answer.text) < 1_000
        assert "Traceback" not in answer.text and str(index) not in answer.text


def test_size_of_a_body_is_limited(index: Path) -> None:
    """Also if no route reads it."""
    sent: Any = [("GET", "/documents", {"content": b"x" * size}) for size in (3_000, 1_000)]
    answers = ask(index, *sent, post(b"[" * 3_000), max_body_bytes=2_000)
    assert [each.status_code for each in answers] == [413, 200, 413]


async def test_total_size_of_bodies_is_limited(index: Path) -> None:
    gone = asyncio.Event()

    async def slow() -> Any:
        yield b'{"query": "' + b"a" * 3_000
        await gone.wait()
        yield b'"}'

    async with serving(index, buffer_bytes=10_000) as client:
        tasks = [asyncio.create_task(client.post("/search", content=slow())) for _ in range(5)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert {each.result().status_code for each in done} == {429}
        assert all("retry-after" in each.result().headers for each in done)
        gone.set()
        await asyncio.gather(*tasks)
        after = await client.post("/search", json={"query": "a" * 3_000})
        assert after.status_code == 200


def test_response_over_a_limit_gets_413(index: Path) -> None:
    body = search({"queries": ["a", "b"], "top_k": 3})
    (fits,) = ask(index, body)
    size = len(fits.content)
    for limits, status in (
        ({"max_results": 6, "max_response_bytes": size}, 200),
        ({"max_results": 5}, 413),
        ({"max_response_bytes": size - 1}, 413),
    ):
        (answer,) = ask(index, body, **limits)
        assert answer.status_code == status, limits


def test_probes_and_metrics_are_served(index: Path) -> None:
    paths = ("livez", "readyz", "health", "metrics")
    live, ready, health, metrics = ask(index, *(("GET", f"/{path}", {}) for path in paths))
    assert live.json() == {"status": "ok"}
    assert ready.json() == health.json()
    assert ready.json()["documents"] == len(TEXTS)
    version = ready.json()["index_version"]
    assert f'rag_demo_index_version{{version="{version}"}} 1.0' in metrics.text
    assert "torch_utils_model_loaded" in metrics.text


def test_too_many_items_are_refused_before_each_is_checked(index: Path) -> None:
    many = [{"text": "b"}] * 5_001
    facts = dict.fromkeys(map(str, range(5_001)))
    deep = {"a": [{"b": [1] * 4_999}] * 2}
    answers = ask(
        index,
        ("POST", "/rerank", {"json": {"query": "a", "documents": many}}),
        *(
            ("PUT", "/documents", {"json": {"documents": documents}})
            for documents in (many, *([{"text": "a", "metadata": each}] for each in (facts, deep)))
        ),
        writable=True,
    )
    for answer in answers:
        assert (answer.status_code, "5,000 items" in answer.text) == (413, True), answer.text
