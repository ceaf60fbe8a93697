"""Connections that are idle, half open or endless are closed; other clients are served."""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterator

import pytest

from support.programs import TIMEOUT_S
from support.service_program import Service, service
from support.serving import make_index

GET = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n"
SEARCH = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = SEARCH + b"transfer-encoding: chunked\r\n\r\n"
LIMITS = ["header_s=3", "body_s=3", "body_bytes=100000"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Return a service with narrow limits."""
    index = make_index(tmp_path_factory.mktemp("connections") / "index")
    environment = {**os.environ, "LEVEL": "INFO"}
    with service(index, *LIMITS, "connections=20", env=environment) as started:
        yield started
        assert started.stop() == 143
        output = started.output()
    assert "\x1b" not in output and "FAKE" not in output and "pip install" not in output
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
@pytest.mark.parametrize("sent", [b"", b"GET / HT", GET, SEARCH])
def test_idle_and_incomplete_connections_are_closed(served: Service, sent: bytes) -> None:
    assert conversation(served, sent) == b""


@pytest.mark.slow
def test_slow_head_does_not_extend_the_idle_time(served: Service) -> None:
    with connect(served) as connection:
        connection.sendall(GET + b"\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += connection.recv(65536)
        assert b" 200 " in received.split(b"\r\n")[0]
        sent = 0
        try:
            while not select.select([connection], [], [], 0.02)[0]:
                connection.sendall(b"G")
                sent += 1
                assert sent < TIMEOUT_S / 0.02
            assert connection.recv(1) == b""
        except ConnectionError:
            pass
    assert sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([SEARCH, b"content-length: 100\r\n\r\n{"], b" 408 "),
        ([CHUNKED, b"1\r\n{\r\n"], b" 408 "),
        ([CHUNKED, *[b"1000\r\n" + b" " * 4096 + b"\r\n"] * 30], b" 413 "),
    ],
    ids=["silent", "dripping", "endless"],
)
def test_incomplete_bodies_are_refused(served: Service, parts: list[bytes], status: bytes) -> None:
    # The system may drop an answer that meets a client which is still sending.
    answers = (conversation(served, *parts).split(b"\r\n")[0] for _ in range(5))
    assert any(status in answer for answer in answers)


@pytest.mark.slow
def test_longest_idle_connection_is_closed_above_limit(served: Service) -> None:
    silent = [connect(served) for _ in range(40)]
    assert served.ask("/livez")[0] == 200
    assert silent[0].recv(1) == b""
    for connection in silent:
        connection.close()


@pytest.mark.slow
def test_invalid_http_gets_400(served: Service) -> None:
    """No request forges a line of the log."""
    bad = [
        b"\x16\x03\x01 a TLS hello\r\n\r\n",
        GET + b"host: b\r\n\r\n",
        GET + b"x-request-id: a\nFAKE\r\n\r\n",
        SEARCH + b"content-length: -1\r\n\r\n",
        GET + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + GET + b"\r\n",
    ]
    for each in bad:
        assert b" 400 " in conversation(served, each).split(b"\r\n")[0], each[:60]


@pytest.mark.slow
def test_unusual_valid_requests_are_answered(served: Service) -> None:
    upgrade = GET + b"connection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    assert b" 200 " in conversation(served, upgrade)
    enough = SEARCH + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    enough += b"1\r\n \r\n" * 99 + b"2\r\n{}\r\n0\r\n\r\n"
    assert b" 422 " in conversation(served, enough).split(b"\r\n")[0]
    coloured = b"GET /\x1b[31m%0aFAKE HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    conversation(served, coloured)
    assert served.ask("/%1b[31m%0aFAKE")[0] == 404
