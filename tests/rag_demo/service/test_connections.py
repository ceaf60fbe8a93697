"""Clients that send garbage; other clients are served."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest

from tests.support.programs import TIMEOUT_S
from tests.support.service_program import Service, service
from tests.support.serving import make_index

GET = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n"
SEARCH = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Return a service that closes idle connections after three seconds."""
    index = make_index(tmp_path_factory.mktemp("connections") / "index")
    environment = {**os.environ, "LEVEL": "INFO"}
    with service(index, "idle_timeout_s=3", env=environment) as started:
        yield started
        assert started.stop() == 143
        output = started.output()
    assert not [text for text in ("Traceback", "\x1b", "FAKE", "pip install") if text in output]
    assert all(json.loads(line) for line in output.splitlines())


def connect(served: Service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), TIMEOUT_S)


def conversation(served: Service, *parts: bytes) -> bytes:
    """Send parts and return all that the service sends until it closes the connection."""
    with connect(served) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
            while data := connection.recv(65536):
                received += data
        except (ConnectionResetError, BrokenPipeError):
            pass
        return received


@pytest.mark.slow
def test_invalid_request_forges_no_line_of_the_log(served: Service) -> None:
    """Invalid HTTP gets 400; control characters of a path are escaped."""
    bad = [
        b"\x16\x03\x01 a TLS hello\r\n\r\n",
        GET + b"x-request-id: a\nFAKE\r\n\r\n",
        SEARCH + b"content-length: -1\r\n\r\n",
        SEARCH.replace(b"localhost", b"a") + b"transfer-encoding: chunked\r\n\r\nZZ\r\n",
    ]
    for each in bad:
        assert b" 400 " in conversation(served, each).split(b"\r\n")[0], each[:60]
    coloured = b"GET /\x1b[31m%0aFAKE HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    conversation(served, coloured)
    assert served.ask("/%1b[31m%0aFAKE")[0] == 404
