"""The replicas of docs/deploy/compose.postgres.yaml as processes, which share one index."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
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
def running(*command: str) -> Iterator[None]:
    """Run a service until the end of the block, and then end it by SIGTERM."""
    secret = {"PGPASSWORD": PASSWORD, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, env={**os.environ, **secret}, stderr=subprocess.PIPE, text=True
    )
    try:
        yield
        process.terminate()
        _, log = process.communicate(timeout=TIMEOUT_S)
        assert PASSWORD not in log
        assert process.returncode == 143, log
    finally:
        process.kill()
        process.wait()


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Send a request; return the status, 0 without an answer, and the decoded body."""
    token = TOKENS["--admin-token-file" if method == "PUT" else "--token-file"]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"authorization": f"Bearer {token}", "content-type": "application/json"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, json.load(answer)
    except OSError:
        return 0, None


def test_two_replicas_share_one_index(
    server: PostgresServer, table: str, tiny_model: Path, tmp_path: Path
) -> None:
    """What one writes is found by the other at once."""
    compose = yaml.safe_load((ROOT / "docs" / "deploy" / "compose.postgres.yaml").read_text())
    for name, token in TOKENS.items():
        (tmp_path / name).write_text(token)
    source = write_lines(tmp_path / "notes.jsonl", [{"id": "first", "text": "the first note"}])
    url = f"{server.url}?table={table}"
    succeed("index", source, "--out", url, "--model", tiny_model, "--device", "cpu", "--no-cache")
    values = {"--index": url.replace(f":{PASSWORD}", ""), "--host": "127.0.0.1",
              **{name: str(tmp_path / name) for name in TOKENS}}  # fmt: skip
    names = [each.partition("=")[0] for each in compose["services"]["rag-demo"]["command"]]
    options = [f"{name}={values[name]}" if name in values else name for name in names]
    serve = [sys.executable, "-m", "rag_demo", "serve", *options, "--model", str(tiny_model)]
    ports = [free_port(), free_port()]
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(running(*serve, "--port", str(port)))
        wait_for(lambda: all(ask(port, "GET", "/readyz")[0] == 200 for port in ports))
        new = {"documents": [{"id": "second", "text": "the second note"}]}
        assert ask(ports[0], "PUT", "/documents", new)[0] == 200
        for port in ports:
            status, found = ask(port, "POST", "/search", {"query": "note"})
            assert status == 200, found
            assert {each["id"] for each in found["results"]} == {"first", "second"}
