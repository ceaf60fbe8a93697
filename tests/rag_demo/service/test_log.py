"""The log: whose requests it names, and that no client forges a line of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import TIMEOUT_S
from tests.support.service_program import Service, service
from tests.support.serving import ask, search


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
    assert [(each["client"], each["route"], each["status"]) for each in lines[-2:]] == [
        ("203.0.113.5", "unknown", 401),
        ("203.0.113.5", "unknown", 401),
    ]


_LOGGING = """
import logging
from rag_demo.service.logs import configure_logging
logger = logging.getLogger("rag_demo")
logger.addHandler(logging.StreamHandler())  # as the commands do for warnings
configure_logging("json", "INFO")
logger.warning("the index is damaged")
logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
"""


@pytest.mark.slow
def test_log_has_one_writer_of_json() -> None:
    """Clients can cause warnings of uvicorn, which are left out."""
    done = subprocess.run([sys.executable, "-c", _LOGGING], capture_output=True, text=True)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["message"], line["level"]) == ("the index is damaged", "WARNING")


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
    """Invalid HTTP gets 400; control characters of a path are escaped."""
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
    assert not [text for text in ("Traceback", "\x1b", "FAKE") if text in output]
    assert all(json.loads(line) for line in output.splitlines())
