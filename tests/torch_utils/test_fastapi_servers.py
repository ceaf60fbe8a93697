"""The lifespan in real servers: released exactly once in each process, however they are stopped."""

from __future__ import annotations

import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from programs import IMPORT_PATH
from torch_utils.clean_exit import ExitReport, check

APPLICATION = """
import os, pathlib, signal, sys, threading
from torch_utils import Resource
from torch_utils.fastapi import lifespan

FOLDER = pathlib.Path(__file__).parent

class Model(Resource):
    def __init__(self, name):
        self.name = name

    def _release(self):
        # In one piece: workers share stderr.
        os.write(2, f"released {self.name} {os.getpid()}\\n".encode())

@lifespan(deadline_s=float(os.environ.get("DEADLINE_S", "60")))
async def models(app, scope):
    scope.manage(Model("older"))
    scope.manage(Model("newer"))
    if os.environ.get("HANGS"):
        scope.callback(threading.Event().wait)
    if os.environ.get("AGAIN"):  # A second Ctrl-C, while things are being closed.
        scope.callback(os.kill, os.getpid(), signal.SIGINT)
    (FOLDER / f"started-{os.getpid()}").touch()
    yield
    os.write(2, f"stopping {os.getpid()}\\n".encode())

def application():
    from starlette.applications import Starlette
    return Starlette(lifespan=models)

app = application()
"""


def serve(
    tmp_path: Path, server: list[str], stop: signal.Signals, processes: int = 1, **env: str
) -> ExitReport:
    """Run the application below a server until as many processes of it have started."""
    import os

    (tmp_path / "application.py").write_text(APPLICATION)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(port=port, folder=tmp_path) for word in server]
    # Says when all have started: the server's own words differ, and so does their number.
    waiter = tmp_path / "waiter.py"
    waiter.write_text(
        "import pathlib, sys, threading, time, runpy\n"
        "def wait():\n"
        f"    while len(list(pathlib.Path({str(tmp_path)!r}).glob('started-*'))) < {processes}:\n"
        "        time.sleep(0.05)\n"
        "    print('all have started', flush=True)\n"
        "if __name__ == '__main__':\n"
        "    threading.Thread(target=wait, daemon=True).start()\n"
        f"    sys.argv = {words!r}\n"
        f"    runpy.run_module({words[0]!r}, run_name='__main__', alter_sys=True)\n"
    )
    path = f"{tmp_path}{os.pathsep}{IMPORT_PATH}"
    return check(
        [sys.executable, str(waiter)],
        stop_signal=stop,
        stop_when="all have started",
        timeout_s=300,
        max_shutdown_s=120,
        env={**os.environ, "PYTHONPATH": path, **env},
        cwd=tmp_path,
    )


def released(report: ExitReport) -> dict[str, list[str]]:
    """What each process released, in order."""
    by_process: dict[str, list[str]] = {}
    for line in report.stderr.splitlines():
        if line.startswith("released "):
            _, name, pid = line.split()
            by_process.setdefault(pid, []).append(name)
    return by_process


UVICORN = ["uvicorn", "application:app", "--port", "{port}", "--log-level", "warning"]
SERVERS = {
    "uvicorn, TERM": (UVICORN, signal.SIGTERM, 1),
    "uvicorn, INT": (UVICORN, signal.SIGINT, 1),
    "uvicorn, two workers": ([*UVICORN, "--workers", "2"], signal.SIGTERM, 2),
    "uvicorn, reload": ([*UVICORN, "--reload", "--reload-dir", "{folder}"], signal.SIGINT, 1),
    "gunicorn": (
        "gunicorn -k uvicorn_worker.UvicornWorker -w 2 -b 127.0.0.1:{port} application:app".split(),
        signal.SIGTERM,
        2,
    ),
    "hypercorn": (["hypercorn", "-b", "127.0.0.1:{port}", "application:app"], signal.SIGTERM, 1),
    "granian": (
        "granian --interface asgi --host 127.0.0.1 --port {port} application:app".split(),
        signal.SIGTERM,
        1,
    ),
}
QUICK = {"uvicorn, TERM"}


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SERVERS],
)
def test_released_once_in_each_process(name: str, tmp_path: Path) -> None:
    """In reverse order, and clean-exit finds nothing."""
    server, stop, processes = SERVERS[name]
    needed = [server[0], "starlette", *(["uvicorn_worker"] if name == "gunicorn" else [])]
    for package in needed:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    report = serve(tmp_path, server, stop, processes)
    assert report.clean, str(report) + report.stderr
    assert list(released(report).values()) == [["newer", "older"]] * processes, report.stderr


@pytest.mark.slow
def test_second_interrupt_while_closing(tmp_path: Path) -> None:
    """Ctrl-C twice: still all of it, once."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    report = serve(tmp_path, UVICORN, signal.SIGINT, AGAIN="1")
    assert list(released(report).values()) == [["newer", "older"]], report.stderr


@pytest.mark.slow
def test_what_hangs_is_named_and_the_server_stops(tmp_path: Path) -> None:
    """By its deadline, and on stderr although nobody has configured this library's log."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    report = serve(tmp_path, UVICORN, signal.SIGTERM, HANGS="1", DEADLINE_S="0.5")
    assert report.exit_code in (0, 120), str(report)
    assert "Event.wait is still being closed" in report.stderr
    assert "not begun: Model, Model" in report.stderr
    assert released(report) == {}
    assert not [one for one in report.findings if one.id == "hang"]


def test_client_of_starlette(tmp_path: Path) -> None:
    """Its test client starts and stops the application in a thread of its own."""
    pytest.importorskip("httpx", reason="httpx is not installed")
    testclient = pytest.importorskip("starlette.testclient", reason="starlette is not installed")
    from starlette.applications import Starlette

    from torch_utils import Resource, SafePyTorchCleanup
    from torch_utils.fastapi import lifespan

    closed: list[str] = []

    class Model(Resource):
        def _release(self) -> None:
            closed.append("closed")

    @lifespan
    async def models(app: object, scope: SafePyTorchCleanup):  # type: ignore[no-untyped-def]
        yield {"model": scope.manage(Model())}

    for count in (1, 2):
        with testclient.TestClient(Starlette(lifespan=models)) as client:
            assert not client.app_state["model"].closed
            assert client.get("/").status_code == 404
        assert closed == ["closed"] * count
