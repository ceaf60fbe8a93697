"""The server as a program: it answers what it has let in, gives back, and leaves cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from serving import Embedder, make_index

from programs import ROOT, TIMEOUT_S, UNDER_CLEAN_EXIT
from rag_demo.commands import run
from rag_demo.errors import ModelError, RagDemoError
from rag_demo.service.listener import bind
from rag_demo.service.server import run_server
from rag_demo.service.settings import Settings

# The first question waits for a line on standard input; SIGTERM comes while it is asked.
PROGRAM = """
    import sys, threading
    from pathlib import Path
    from serving import Embedder
    from rag_demo.service import connections
    from rag_demo.service.listener import bind
    from rag_demo.service.log_lines import configure_logging
    from rag_demo.service.server import run_server
    from rag_demo.service.settings import Settings
    from torch_utils import exit_on_signals

    def before(texts):
        if "held up" in texts:
            print("asked", flush=True)
            sys.stdin.readline()

    def load():
        return Embedder(before)

    connections._FIRST_S = 100.0  # A busy machine may take its time.
    exit_on_signals()
    configure_logging("json", "INFO")
    settings = Settings(index=Path(sys.argv[1]), retriever="faiss", port=0)
    listener = bind(settings)
    print(listener.getsockname()[1], flush=True)
    run_server(settings, listener, load_model=load)
"""


def ask(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        method = "GET" if body is None else "POST"
        headers = {"content-type": "application/json"}
        connection.request(method, path, body and json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), TIMEOUT_S).close()
    except OSError:
        return False
    return True


def test_sigterm_in_the_middle(tmp_path: Path) -> None:
    """What was accepted is answered; the exit is 143, and clean. SIGHUP before reloads."""
    folder = make_index(tmp_path / "index")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    paths = [ROOT, ROOT / "tests", ROOT / "tests/rag_demo"]
    server = subprocess.Popen(
        [
            sys.executable,
            *UNDER_CLEAN_EXIT,
            str(program),
            str(folder),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )
    assert server.stdin is not None and server.stdout is not None and server.stderr is not None
    said: list[str] = []
    stderr = server.stderr
    reader = threading.Thread(target=lambda: said.extend(stderr))
    reader.start()
    answers: list[Any] = []
    try:
        port = int(server.stdout.readline())
        assert ask(port, "/readyz")[1]["documents"] == 4
        make_index(folder, ["one", "two"])
        server.send_signal(signal.SIGHUP)
        while ask(port, "/readyz")[1]["documents"] != 2:
            threading.Event().wait(0.05)
        body = {"query": "held up", "mode": "dense"}
        clients = [
            threading.Thread(target=lambda: answers.append(ask(port, "/search", body)))
            for _ in range(3)
        ]
        clients[0].start()
        assert server.stdout.readline() == "asked\n"
        for client in clients[1:]:
            client.start()
        while "rag_demo_waiting_texts 2.0" not in get(port, "/metrics"):
            threading.Event().wait(0.05)
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as new:
            server.send_signal(signal.SIGTERM)
            while is_listening(port):
                threading.Event().wait(0.05)
            # Connected before, this one was let in; what it was made for comes now.
            new.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            last = b"".join(iter(lambda: new.recv(65536), b""))
        assert last.startswith(b"HTTP/1.1 200"), last
        assert b"connection: close" in last.lower()
        server.stdin.write("\n" * 3)
        server.stdin.close()
        for client in clients:
            client.join(TIMEOUT_S)
        code = server.wait(TIMEOUT_S)
    finally:
        if server.poll() is None:
            server.kill()
        reader.join(TIMEOUT_S)
        server.stdout.close()
        stderr.close()
    output = "".join(said)
    assert code == 143, output
    assert "clean-exit: clean" in output, output
    assert [status for status, _ in answers] == [200] * 3, output
    lines = [json.loads(line) for line in said if line.startswith("{")]
    assert all(line["request_id"] for line in lines if line.get("route") == "/search")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--no-token"),
        (["--host", ""], "^this machine can be reached"),
        (["--keep-alive", "soon"], "--keep-alive"),
        (["--port", "abc"], "'--port': 'abc' .* whole number, from 0 to 65535"),
        (["--port", "65536"], "'--port': '65536' .* whole number, from 0 to 65535"),
        (["--workers", "0"], "'--workers': '0' .* whole number, 1 or more"),
        (["--host", "203.0.113.1", "--token-file", "TOKEN"], "cannot be listened on"),
        (["--host", "a\udcff", "--no-token"], "name another --host"),
        (["--token-file", "EMPTY"], "EMPTY' is empty"),
        (["--token-file", "BYTES"], "BYTES' is not printable ASCII"),
        (["--token-file", "ABSENT"], "ABSENT' cannot be read: No such file"),
    ],
)
def test_wrong_use_is_said(
    index: Path, tmp_path: Path, arguments: list[str], message: str, monkeypatch: Any
) -> None:
    """Before anything is loaded; another host without a token first of all."""
    monkeypatch.delenv("RAG_DEMO_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TOKEN").write_text("secret\n")
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "BYTES").write_bytes(b"se\xffcret")
    with pytest.raises(RagDemoError, match=message):
        run(["serve", "--index", str(index), *arguments])


def test_no_index_is_said(tmp_path: Path) -> None:
    """With the command that makes one."""
    with pytest.raises(RagDemoError, match="rag-demo index"):
        run(["serve", "--index", str(tmp_path / "nothing")])


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_hangups_mean_what_they_meant_before(tmp_path: Path) -> None:
    """To the program that called the command; while it runs, they are ignored, or reload."""

    def heard(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGHUP, heard)
    try:
        with pytest.raises(RagDemoError):
            run(["serve", "--index", str(tmp_path / "nothing")])
        assert signal.getsignal(signal.SIGHUP) is heard
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_waits_for_no_answer(tmp_path: Path) -> None:
    """All is given back in order all the same, before the interrupt goes its way."""
    folder = make_index(tmp_path / "index")
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    paths = [ROOT, ROOT / "tests", ROOT / "tests/rag_demo"]
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, str(program), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        ) as server,
    ):
        assert server.stdin is not None and server.stdout is not None
        try:
            port = int(server.stdout.readline())
            assert ask(port, "/readyz")[0] == 200
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
            body = json.dumps({"query": "held up", "mode": "dense"})
            client.request("POST", "/search", body, {"content-type": "application/json"})
            assert server.stdout.readline() == "asked\n"
            server.send_signal(signal.SIGINT)
            with pytest.raises(ConnectionRefusedError):  # It has begun to stop.
                while True:
                    with contextlib.suppress(ConnectionResetError):  # It was just about to.
                        get(port, "/livez")
            server.send_signal(signal.SIGINT)
            with pytest.raises(ConnectionError):
                client.getresponse()
            client.close()
            server.stdin.close()
            assert server.wait(TIMEOUT_S) == -signal.SIGINT, log.read_text()
        finally:
            server.kill()
    assert "CancelledError" not in log.read_text()  # Of the closing, in the middle.


@pytest.mark.parametrize("is_ours", [True, False])
def test_answers_do_not_wait_for_acknowledgements(is_ours: bool, index: Path) -> None:
    """asyncio turns Nagle's algorithm off, but only on sockets that name their protocol."""
    listener = bind(Settings(index=index, port=0)) if is_ours else socket.create_server(("", 0))

    async def main() -> int:
        found = asyncio.get_running_loop().create_future()

        def accepted(reader: Any, writer: Any) -> None:
            option = socket.IPPROTO_TCP, socket.TCP_NODELAY
            found.set_result(writer.get_extra_info("socket").getsockopt(*option))
            writer.close()

        async with await asyncio.start_server(accepted, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            delay = await found
            writer.close()
        return delay

    assert bool(asyncio.run(main())) is is_ours


def test_what_cannot_be_loaded_is_raised_once(
    index: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For the command to say in a line; the server says nothing of it, nor prints it."""

    def load() -> Any:
        raise ModelError("there are no weights")

    settings = Settings(index=index, retriever="faiss", port=0)
    with pytest.raises(ModelError, match="no weights"):
        run_server(settings, bind(settings), load_model=load)
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


@pytest.mark.parametrize("is_ignored", [True, False])
def test_an_interrupt_that_is_ignored_stops_it_all_the_same(is_ignored: bool, index: Path) -> None:
    """A script's `&` has SIGINT ignored: the caller is told the number, as nothing is raised."""
    settings = Settings(index=index, retriever="faiss", port=0)

    def interrupt(said: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def serve() -> int:
        return run_server(settings, bind(settings), load_model=Embedder, tell=interrupt)

    before = signal.signal(
        signal.SIGINT, signal.SIG_IGN if is_ignored else signal.default_int_handler
    )
    try:
        if is_ignored:
            assert serve() == signal.SIGINT
        else:
            with pytest.raises(KeyboardInterrupt):
                serve()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e999", "1,5", ""])
@pytest.mark.parametrize("command", ["serve --index x --drain", "search x what --min-score"])
def test_numbers_are_finite(command: str, value: str) -> None:
    """Or one line says which option it is; `--min-score` may be negative."""
    *words, option = command.split()
    if (option, value) == ("--min-score", "-1"):
        return
    with pytest.raises(RagDemoError, match=option):
        run([*words, f"{option}={value}"])
