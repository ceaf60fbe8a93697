"""Who may ask for what, and the log of it, in which no client forges a line."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import TIMEOUT_S
from tests.support.service_program import service
from tests.support.serving import ask, search


def test_head_is_answered_where_get_is(index: Path) -> None:
    paths = ["/", "/livez", "/readyz", "/metrics", "/v1/models", "/admin/models", "/openapi.json"]
    answers = ask(index, *(("HEAD", path, {}) for path in paths))
    assert [answer.status_code for answer in answers] == [200] * len(paths)
    cases: list[tuple[str, str, int, set[str]]] = [
        ("HEAD", "/search", 405, {"POST"}),
        ("POST", "/livez", 405, {"GET"}),
        ("POST", "/documents", 405, {"GET", "PUT"}),
        ("POST", "/documents/1", 405, {"GET", "DELETE"}),
        ("HEAD", "/nothing", 404, set()),
    ]
    answers = ask(index, *((method, path, {}) for method, path, _, _ in cases))
    for (method, path, status, allowed), answer in zip(cases, answers, strict=True):
        assert answer.status_code == status, (method, path)
        assert {*answer.headers.get("allow", "").split(", ")} - {""} == allowed


def test_foreign_host_names_are_refused_on_loopback(index: Path) -> None:
    """Otherwise DNS rebinding would let a page of another site read and administer the service."""
    rebound = {"headers": {"host": "evil.example:8000", "origin": "http://evil.example:8000"}}
    kinds: list[Any] = [rebound, {}, {"headers": {"host": "[::1]:8000"}}]
    for path in ("/admin/models", "/info"):
        answers = ask(index, *(("GET", path, options) for options in kinds))
        assert [answer.status_code for answer in answers] == [421, 200, 200]


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
        ({"x-forwarded-for": "203.0.113.5"}, 403),
        ({"via": "a"}, 403),
    ]
    answers = ask(index, *(("POST", "/admin/reload", {"headers": each}) for each, _ in cases))
    assert [answer.status_code for answer in answers] == [status for _, status in cases]


CLIENT, ADMIN = "client-" + "c" * 16, "admin-" + "a" * 16


def test_each_token_opens_its_own_routes(index: Path) -> None:
    expected = {
        CLIENT: [200, 200, 200, 403, 403, 403, 200],
        ADMIN: [200, 200, 200, 422, 200, 200, 200],
        "other": [401] * 6 + [200],
        "": [401] * 6 + [200],
    }
    paths: list[Any] = [
        ("POST", "/search", {"json": {"query": "a"}}),
        ("POST", "/", {"json": {"inputs": "a"}}),  # It embeds; only GET shows the page.
        ("GET", "/documents/1", {}),
        ("PUT", "/documents", {"json": {"documents": []}}),
        ("GET", "/admin/models", {}),
        ("GET", "/debug/memory", {}),
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


def test_administration_needs_an_admin_token_beside_tokens_and_on_other_hosts(index: Path) -> None:
    headers = {"authorization": f"Bearer {CLIENT}"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"host": "0.0.0.0", "no_token": True}, "a client on the same machine"),
        ({"token": (CLIENT,)}, "sets RAG_DEMO_ADMIN_TOKEN"),
        ({"token": (CLIENT,), "admin_token": (ADMIN,)}, "; send one"),
    ]
    for options, hint in cases:
        refused, info = ask(
            index,
            *(("GET", path, {"headers": headers}) for path in ("/admin/models", "/info")),
            **options,
        )
        assert (refused.status_code, info.status_code) == (403, 200)
        assert hint in refused.json()["detail"], options


def test_log_line_names_client_and_request(index: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing else that a client invents is kept, neither at full length nor in metrics."""
    known = {"authorization": f"Bearer {CLIENT}"}
    with caplog.at_level("INFO", "rag_demo.service"):
        own, generated, *_, exposition = ask(
            index,
            search({"query": "a"}, **known, **{"x-request-id": "trace-1"}),
            search({"query": "a"}, **{"x-request-id": "a b\t{}"}),
            ("GET", "/documents/7", {}),
            ("GET", "/invented" + "x" * 10_000 + "%0A", {"headers": known}),
            ("INVENTED", "/nowhere", {"headers": known}),
            ("GET", "/metrics", {"headers": known}),
            token=(CLIENT,),
            client="203.0.113.5",
        )
    assert own.headers["x-request-id"] == "trace-1"
    assert len(generated.headers["x-request-id"]) == 32
    records = [record for record in caplog.records if "status" in record.__dict__]
    names = ("client", "method", "route", "status")
    lines = [tuple(record.__dict__[name] for name in names) for record in records[-6:]]
    assert lines[:3] == [
        ("203.0.113.5", "POST", "/search", 200),
        ("203.0.113.5", "POST", "/search", 401),
        ("203.0.113.5", "GET", "/documents/7", 401),
    ]
    messages = [record.getMessage() for record in records]
    assert max(map(len, messages)) < 300
    assert not any("INVENTED" in message or "\n" in message for message in messages)
    assert "invented" not in exposition.text.lower()
    assert 'method="other",route="unknown",status="404"}' in exposition.text


@pytest.mark.slow
def test_invalid_request_forges_no_line_of_the_log(index: Path) -> None:
    """Invalid HTTP gets 400; control characters of a path are escaped; all lines are JSON."""
    bad = [
        b"\x16\x03\x01 a TLS hello\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx-request-id: a\nFAKE\r\n\r\n",
        b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
    ]
    with service(index, env={**os.environ, "LEVEL": "INFO"}) as served:
        for each in bad:
            with socket.create_connection(("127.0.0.1", served.port), TIMEOUT_S) as connection:
                connection.sendall(each)
                assert connection.recv(65536).startswith(b"HTTP/1.1 400"), each
        assert served.ask("/%1b[31m%0aFAKE")[0] == 404
        assert served.stop() == 143
        output = served.output()
    assert not [text for text in ("Traceback", "\x1b", "\nFAKE") if text in output]
    assert "Invalid HTTP" not in output  # A warning of uvicorn, which clients can cause.
    assert 404 in [json.loads(line).get("status") for line in output.splitlines()]
