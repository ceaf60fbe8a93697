"""Who may ask for what: methods, host names, tokens, and the log of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import ask, search


def test_head_is_answered_where_get_is(index: Path) -> None:
    paths = ["/", "/livez", "/readyz", "/metrics", "/v1/models", "/admin/models", "/openapi.json"]
    answers = ask(index, *(("HEAD", path, {}) for path in paths))
    assert [answer.status_code for answer in answers] == [200] * len(paths)
    refused, wrong, unknown = ask(
        index, ("HEAD", "/search", {}), ("POST", "/livez", {}), ("HEAD", "/nothing", {})
    )
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
    assert unknown.status_code == 404


def test_foreign_host_names_are_refused_on_loopback(index: Path) -> None:
    """Otherwise DNS rebinding would let a page of another site read and administer the service."""
    rebound = {"headers": {"host": "evil.example:8000", "origin": "http://evil.example:8000"}}
    requests = [
        ("GET", path, options)
        for options in (rebound, {}, {"headers": {"host": "[::1]:8000"}})
        for path in ("/admin/models", "/info")
    ]
    answers = ask(index, *requests)
    assert [answer.status_code for answer in answers] == [421, 421, 200, 200, 200, 200]


def test_administration_on_another_host_needs_a_token(index: Path) -> None:
    requests: list[Any] = [("GET", path, {}) for path in ("/admin/models", "/info")]
    answers = ask(index, *requests, host="0.0.0.0", no_token=True)
    assert [answer.status_code for answer in answers] == [403, 200]


def test_request_is_a_span_below_the_callers(index: Path) -> None:
    needs = "needs opentelemetry-sdk: the dependency group service-test"
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason=needs)
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    pytest.importorskip("fastapi.telemetry", reason="needs the extra otel: an older FastAPI")
    from opentelemetry import trace

    exporter, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(sdk.export.SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    ask(index, search({"query": "a"}, traceparent=parent))
    (span,) = [each for each in exporter.get_finished_spans() if each.name == "POST /search"]
    assert span.attributes["http.response.status_code"] == 200
    assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" in parent


def test_only_local_programs_administer_without_token(index: Path) -> None:
    """Proxies and pages of other sites on the same machine are refused."""
    cases: list[tuple[Any, int]] = [
        ({}, 200),
        ({"origin": "http://127.0.0.1:8000"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"x-forwarded-for": "203.0.113.5"}, 403),
        ({"via": "a"}, 403),
    ]
    answers = ask(index, *(("POST", "/admin/reload", {"headers": each}) for each, _ in cases))
    found = [answer.status_code for answer in answers]
    assert found == [status for _, status in cases]


CLIENT, ADMIN = "client-" + "c" * 16, "admin-" + "a" * 16


def test_each_token_opens_its_own_routes(index: Path) -> None:
    expected = {
        CLIENT: [200, 200, 200, 403, 403, 200],
        ADMIN: [200, 200, 200, 422, 200, 200],
        "other": [401, 401, 401, 401, 401, 200],
        "": [401, 401, 401, 401, 401, 200],
    }
    paths: list[Any] = [
        ("POST", "/search", {"json": {"query": "a"}}),
        ("POST", "/", {"json": {"inputs": "a"}}),  # It embeds; only GET shows the page.
        ("GET", "/documents/1", {}),
        ("PUT", "/documents", {"json": {"documents": []}}),
        ("GET", "/admin/models", {}),
        ("GET", "/", {}),
    ]
    answers = ask(
        index,
        *(
            (method, path, {**body, "headers": {"authorization": f"Bearer {token}".strip()}})
            for token in expected
            for method, path, body in paths
        ),
        token=("another-" + "x" * 16, CLIENT),
        admin_token=ADMIN,
        writable=True,
    )
    found = [each.status_code for each in answers]
    assert found == [status for statuses in expected.values() for status in statuses]


def test_clients_token_does_not_administer_without_admin_token(index: Path) -> None:
    headers = {"authorization": f"Bearer {CLIENT}"}
    (answer,) = ask(index, ("GET", "/admin/models", {"headers": headers}), token=(CLIENT,))
    assert answer.status_code == 403
    assert "RAG_DEMO_ADMIN_TOKEN" in answer.json()["detail"]
