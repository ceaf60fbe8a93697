"""Who may ask for what, and the log of it, in which no client forges a line."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import TIMEOUT_S
from tests.support.service_program import Service, service
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
        CLIENT: [200, 200, 200, 403, 403, 403, 200],
        ADMIN: [200, 200, 200, 422, 200, 200, 200],
        "other": [401, 401, 401, 401, 401, 401, 200],
        "": [401, 401, 401, 401, 401, 401, 200],
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


def test_clients_token_does_not_administer_without_admin_token(index: Path) -> None:
    headers = {"authorization": f"Bearer {CLIENT}"}
    request = "GET", "/admin/models", {"headers": headers}
    for admin_token, hint in (((), "sets RAG_DEMO_ADMIN_TOKEN"), ((ADMIN,), "; send one")):
        (answer,) = ask(index, request, token=(CLIENT,), admin_token=admin_token)
        assert answer.status_code == 403
        assert hint in answer.json()["detail"]


def test_log_line_names_the_client_of_a_refused_request(
    index: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the id of the request, which a client may choose if it is harmless."""
    with caplog.at_level("INFO", "rag_demo.service"):
        own, generated, _ = ask(
            index,
            search({"query": "a"}, **{"x-request-id": "trace-1"}),
            search({"query": "a"}, authorization="Bearer wrong", **{"x-request-id": "a b\t{}"}),
            ("GET", "/documents/7", {}),
            token=("a-token-of-a-client",),
            client="203.0.113.5",
        )
    assert own.headers["x-request-id"] == "trace-1"
    assert len(generated.headers["x-request-id"]) == 32
    lines = [record.__dict__ for record in caplog.records if "status" in record.__dict__]
    names = ("client", "method", "route", "status")
    assert [tuple(each[name] for name in names) for each in lines[-2:]] == [
        ("203.0.113.5", "POST", "/search", 401),
        ("203.0.113.5", "GET", "/documents/7", 401),
    ]


def test_nothing_that_a_client_invents_is_kept(
    index: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither as a label of metrics nor, at full length, in the log."""
    with caplog.at_level("INFO", "rag_demo.service"):
        *_, exposition = ask(
            index,
            *((f"INVENTED{n}", "/search", {}) for n in range(20)),
            *(("GET", f"/invented{n}" + "x" * 10_000 + "%0A", {}) for n in range(20)),
            ("GET", "/metrics", {}),
        )
    assert "invented" not in exposition.text.lower()
    assert 'method="other"' in exposition.text
    lines = [record.getMessage() for record in caplog.records if "status" in record.__dict__]
    assert max(map(len, lines)) < 300
    assert not any("INVENTED" in line or "\n" in line for line in lines)


def conversation(served: Service, request: bytes) -> bytes:
    """Return all that the service sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", served.port), TIMEOUT_S) as connection:
        received = b""
        try:
            connection.sendall(request)
            while data := connection.recv(65536):
                received += data
        except (ConnectionResetError, BrokenPipeError):
            pass
        return received


@pytest.mark.slow
def test_invalid_request_forges_no_line_of_the_log(index: Path) -> None:
    """Invalid HTTP gets 400; control characters of a path are escaped; all lines are JSON."""
    host = b"HTTP/1.1\r\nhost: localhost\r\n"
    bad = [
        b"\x16\x03\x01 a TLS hello\r\n\r\n",
        b"GET /livez " + host + b"x-request-id: a\nFAKE\r\n\r\n",
        b"POST /search " + host + b"content-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
    ]
    with service(index, "idle_timeout_s=3", env={**os.environ, "LEVEL": "INFO"}) as served:
        for each in bad:
            assert b" 400 " in conversation(served, each).split(b"\r\n")[0], each[:60]
        conversation(served, b"GET /\x1b[31m%0aFAKE " + host + b"connection: close\r\n\r\n")
        assert served.ask("/%1b[31m%0aFAKE")[0] == 404
        assert served.stop() == 143
        output = served.output()
    assert not [text for text in ("Traceback", "\x1b", "\nFAKE") if text in output]
    assert "Invalid HTTP" not in output  # A warning of uvicorn, which clients can cause.
    assert 404 in [json.loads(line).get("status") for line in output.splitlines()]
