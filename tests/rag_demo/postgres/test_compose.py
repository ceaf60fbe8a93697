"""deploy/compose.postgres.yaml as processes: a database, two replicas of the service, and Caddy."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.postgres_server import PASSWORD, PostgresServer
from tests.support.programs import ROOT, TIMEOUT_S, free_port
from tests.support.rag_command import succeed, write_lines
from tests.support.waiting import wait_for

yaml = pytest.importorskip("yaml", reason="needs PyYAML: see make test-postgres")
TOKENS = {"--token-file": "secret-of-the-clients", "--admin-token-file": "secret-of-the-owner"}


@contextlib.contextmanager
def running(*command: str, code: int, **more: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program until the end of the block, and expect its exit code after SIGTERM."""
    process = subprocess.Popen(
        command, env={**os.environ, **more}, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
        process.terminate()
        _, log = process.communicate(timeout=TIMEOUT_S)
        assert PASSWORD not in log
        assert process.returncode == code, log
    finally:
        process.kill()
        process.wait()


def ask(port: int, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    """Send a request; return the status, 0 without an answer, and the decoded body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    token = TOKENS["--admin-token-file" if method == "PUT" else "--token-file"]
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    try:
        connection.request(method, path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    except (OSError, http.client.HTTPException):
        return 0, None
    finally:
        connection.close()


def wait_for_status(port: int, status: int) -> None:
    wait_for(lambda: ask(port, "/readyz", method="GET")[0] == status)


def ids(port: int, query: str) -> list[str]:
    status, found = ask(port, "/search", {"query": query, "top_k": 10})
    assert status == 200, found
    return [each["id"] for each in found["results"]]


def test_two_replicas_share_one_index(
    server: PostgresServer, table: str, tiny_model: Path, tmp_path: Path
) -> None:
    """A write through the proxy is found by both at once; without the database they answer 503."""
    caddy = shutil.which("caddy")
    if caddy is None:
        pytest.skip("Caddy is not installed: apt-get install caddy")
    compose = yaml.safe_load((ROOT / "deploy" / "compose.postgres.yaml").read_text())
    service = compose["services"]["rag-demo"]
    assert service["deploy"]["replicas"] == 2
    host = f"tester@127.0.0.1:{server.port}/postgres?table={table}"
    for name, token in TOKENS.items():
        (tmp_path / name).write_text(token)
    source = write_lines(tmp_path / "notes.jsonl", [{"id": "first", "text": "the first note"}])
    url = server.url + f"?table={table}"
    succeed("index", source, "--out", url, "--model", tiny_model, "--device", "cpu", "--no-cache")
    ports = [free_port(), free_port()]
    front = free_port()
    given = {"--index": f"postgresql://{host}", "--host": "127.0.0.1",
             **{name: str(tmp_path / name) for name in TOKENS}}  # fmt: skip
    options = [
        f"{name}={given[name]}" if name in given else name
        for name in (each.partition("=")[0] for each in service["command"])
    ]
    serve = [sys.executable, "-m", "rag_demo", "serve", *options, "--model", str(tiny_model)]
    caddyfile = compose["configs"]["proxy"]["content"]
    for before, after in {
        "http://:8000 {": f"http://:{front} {{\nbind 127.0.0.1",
        "dynamic a rag-demo 8000": "to " + " ".join(f"127.0.0.1:{port}" for port in ports),
    }.items():
        assert before in caddyfile
        caddyfile = caddyfile.replace(before, after)
    (tmp_path / "Caddyfile").write_text(caddyfile)
    proxy = [caddy, "run", "--adapter", "caddyfile", "--config", str(tmp_path / "Caddyfile")]
    secret = {"PGPASSWORD": PASSWORD, "HF_HUB_OFFLINE": "1"}
    with contextlib.ExitStack() as stack:
        replicas = [
            stack.enter_context(running(*serve, "--port", str(port), code=143, **secret))
            for port in ports
        ]
        home = {"HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
        stack.enter_context(running(*proxy, code=0, **home))
        for port in (*ports, front):
            wait_for_status(port, 200)
        new = {"documents": [{"id": "second", "text": "the second note"}]}
        assert ask(front, "/documents", new, "PUT")[0] == 200
        assert [sorted(ids(port, "note")) for port in ports] == [["first", "second"]] * 2
        server.stop()
        for port in ports:
            wait_for_status(port, 503)
            status, problem = ask(port, "/search", {"query": "note", "mode": "bm25"})
            assert status == 503, problem
            assert PASSWORD not in json.dumps(problem)
        server.start()
        for port in (*ports, front):
            wait_for_status(port, 200)
        assert sorted(ids(front, "note")) == ["first", "second"]
        assert all(replica.poll() is None for replica in replicas)
