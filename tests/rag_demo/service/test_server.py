"""The server as a program: signals, exit codes and options."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import service_program
from tests.support.programs import TIMEOUT_S, UNDER_CLEAN_EXIT
from tests.support.rag_command import rag_demo
from tests.support.service_program import service
from tests.support.serving import make_index
from tests.support.waiting import wait_for

GRACE_S = 25  # docs/rag_demo/service.md
WAITING = 'rag_demo_waiting_tokens{lane="model"}'
ARRIVED = re.escape(f"{WAITING} 2.0") + r'|rag_demo_batch_tokens_count\{lane="model"\} 1\.0'
INFO = {**os.environ, "LEVEL": "INFO"}


def test_sigterm_answers_accepted_requests(index: Path) -> None:
    """The exit code is 143 and the exit is clean."""
    with (
        ThreadPoolExecutor() as clients,
        service(index, "retriever=faiss", under=UNDER_CLEAN_EXIT, env=INFO) as served,
    ):
        assert served.ask_json("/readyz")["documents"] == 4
        answers = [clients.submit(served.search, "held up")]
        served.wait_until_held_up()
        answers += [clients.submit(served.search, "held up") for _ in range(2)]
        wait_for(lambda: f"{WAITING} 8.0" in served.ask("/metrics")[1])
        with socket.create_connection(("127.0.0.1", served.port), TIMEOUT_S) as new:
            served.process.send_signal(signal.SIGTERM)
            wait_for(lambda: not served.is_listening())
            # This connection was made before SIGTERM; its request comes now.
            new.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            last = b"".join(iter(lambda: new.recv(65536), b""))
        assert last.startswith(b"HTTP/1.1 200"), last
        assert b"connection: close" in last.lower()
        served.process.stdin.write("\n" * 3)
        served.process.stdin.flush()
        output = served.output()
    assert served.process.returncode == 143, output
    assert "clean-exit: clean" in output, output
    assert [each.result()[0] for each in answers] == [200] * 3, output
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert all(line["request_id"] for line in lines if line.get("route") == "/search")
    assert "stopped: all is closed" in lines[-1].values()


@pytest.mark.slow
def test_exit_does_not_wait_for_a_hung_call(index: Path) -> None:
    """Its model has a lock, as an EmbeddingModel has, which exit callbacks would wait for."""
    with service(index, "timeout=3", "hang_timeout=3") as served:
        assert served.search("hang")[0] == 504
        wait_for(lambda: served.ask("/livez")[0] == 503)
        assert served.ask("/readyz")[0] == 503
        started = time.monotonic()
        assert served.stop() == 143, served.output()
        assert time.monotonic() - started < GRACE_S


@pytest.mark.slow
def test_sigterm_during_a_hung_load_ends_within_the_grace(tmp_path: Path) -> None:
    """A request that waits for the load is refused in the end; probes answer at once."""
    index = make_index(tmp_path / "index")
    (tmp_path / "HANGING").touch()
    with ThreadPoolExecutor() as clients, service(index, "grace=2") as served:
        assert (served.ask("/livez")[0], served.ask("/readyz")[0]) == (200, 503)
        answer = clients.submit(served.search, "a")
        # The request waits for the load, or has begun it.
        wait_for(lambda: re.search(ARRIVED, served.ask("/metrics")[1]))
        started = time.monotonic()
        assert served.stop() == 143, served.output()
        assert time.monotonic() - started < GRACE_S
        assert answer.result()[0] == 503


@pytest.mark.slow
def test_second_interrupt_ends_the_service_at_once(index: Path) -> None:
    with ThreadPoolExecutor() as clients, service(index) as served:
        clients.submit(served.search, "held up")
        served.wait_until_held_up()
        served.process.send_signal(signal.SIGINT)
        wait_for(lambda: not served.is_listening())  # It has begun to stop.
        started = time.monotonic()
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(TIMEOUT_S) == 128 + signal.SIGINT, served.output()
        assert time.monotonic() - started < GRACE_S
        assert "CancelledError" not in served.output()  # Of the closing, in the middle.


@pytest.mark.slow
def test_failing_first_load_ends_the_start(tmp_path: Path) -> None:
    index = make_index(tmp_path / "index")
    (tmp_path / "BROKEN").touch()
    program = [sys.executable, service_program.__file__, str(index)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert done.stderr == f"could not start: {tmp_path} has no weights\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--no-token"),
        (["--hang-timeout", "0"], "--hang-timeout: Input should be greater than 0"),
        (["--host", ""], "this machine can be reached"),
        (["--keep-alive", "soon"], "--keep-alive"),
        (["--port", "65536"], "--port: Input should be less than or equal to 65535"),
        (["--index", "nothing"], "rag-demo index"),
        (["--token", "x"], "--token"),
        (["--host", "203.0.113.1", "--token-file", "TOKEN"], "cannot listen on"),
        (["--token-file", "BYTES"], "BYTES' is not printable ASCII"),
        (["--token-file", "SHORT"], "SHORT' has 6 characters; use at least 16"),
        (["--token-file", "TOKEN", "--token-file", "SHORT"], "SHORT' has 6 characters"),
        (["--token-file", "ABSENT"], "ABSENT' cannot be read: No such file"),
        (["--grace", "nan"], "--grace"),
    ],
)
def test_invalid_options_are_refused_before_loading(
    index: Path, tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAG_DEMO_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TOKEN").write_text("secret-secret-secret\n")
    (tmp_path / "SHORT").write_text("secret\n")
    (tmp_path / "BYTES").write_bytes(b"se\xffcret")
    result = rag_demo("serve", "--index", index, *arguments)
    assert (result.returncode, result.stdout) == (2, ""), str(result)
    *_, last = result.stderr.splitlines()
    assert last.startswith("rag-demo: error: ") and message in last
