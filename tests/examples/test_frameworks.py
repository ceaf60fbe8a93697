"""Run each program of examples/frameworks as its users do: one release per model, a clean exit."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.clean_exit import ExitReport, check
from tests.support.programs import IMPORT_PATH, ROOT, TIMEOUT_S, free_port
from tests.support.waiting import wait_for

BIN = Path(sysconfig.get_path("scripts"))
pytest.importorskip("torch")
pytestmark = pytest.mark.slow

# Appended to model.py: each model notes its process when it is made, and when it is closed.
RECORDER = """
import os
FOLDER = os.path.dirname(os.path.abspath(__file__))
_make = Classifier.__init__

def _note(what, model):
    with open(os.path.join(FOLDER, what), "a") as file:
        file.write(f"{os.getpid()} {id(model)}\\n")

def _noted(self):
    _make(self)
    _note("made", self)

Classifier.__init__ = _noted
Classifier.close = lambda self: _note("closed", self)
"""


Run = Callable[..., ExitReport]


@pytest.fixture
def run(tmp_path: Path, clean_exit: Run) -> Run:
    """Return a function that runs a command beside the programs, with a model that notes its life.

    The exit must be clean, and each model closed once, in the process that made it.
    """
    for path in (ROOT / "examples" / "frameworks").glob("*.py"):
        shutil.copy(path, tmp_path)
    with (tmp_path / "model.py").open("a") as file:
        file.write(RECORDER)
    paths = os.pathsep.join([str(tmp_path), IMPORT_PATH])
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": paths}
    limits = {"timeout_s": 600, "max_shutdown_s": 120, "env": {**os.environ, **quiet}}

    def run(*command: str | Path, models: int = 1, runs: Run = clean_exit, **more: Any) -> Any:
        report = runs([str(word) for word in command], cwd=tmp_path, **limits, **more)
        files = (tmp_path / "made", tmp_path / "closed")
        made, closed = (sorted(f.read_text().splitlines()) if f.exists() else [] for f in files)
        assert len(made) == models, output_of(report)
        assert closed == made, output_of(report)
        return report

    return run


def need(*modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def output_of(report: ExitReport) -> str:
    return f"{report}\n--- stdout\n{report.stdout[-3000:]}\n--- stderr\n{report.stderr[-3000:]}"


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


class Client(threading.Thread):
    """Posts to a server once it listens, then requests ``/stop``, which the server logs."""

    def __init__(self, port: int, posts: list[tuple[str, bytes]]) -> None:
        super().__init__(daemon=True)
        self.port, self.posts, self.answers = port, posts, list[Any]()
        self.start()

    def run(self) -> None:
        wait_for(lambda: listens(self.port))
        url = f"http://127.0.0.1:{self.port}"
        for path, body in self.posts:
            with urllib.request.urlopen(
                urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
            ) as answer:
                self.answers.append(json.load(answer))
        try:
            urllib.request.urlopen(url + "/stop")
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:  # The server stopped in the middle of its answer.
            return


RATE = [("/rate", b'["a text", "another"]')]
STRICT_AND_KIND = [("/strict", b"a text"), ("/kind", b"a text")]
UVICORN = (BIN / "uvicorn", "fastapi_service:app", "--port=PORT")
GUNICORN = (BIN / "gunicorn", "flask_service:app", "--threads=2", "--access-logfile=-")
SERVERS: dict[str, tuple[tuple[str | Path, ...], str, list[tuple[str, bytes]]]] = {
    "fastapi": (UVICORN, "SIGTERM", RATE),
    "fastapi-interrupted": (UVICORN, "SIGINT", RATE),
    "fastapi-workers": ((*UVICORN, "--workers=2"), "SIGTERM", RATE),
    "threads": ((sys.executable, "threads_service.py", "PORT"), "SIGTERM", STRICT_AND_KIND),
    "flask": ((*GUNICORN, "--bind=127.0.0.1:PORT"), "SIGTERM", RATE),
}
NEEDS = {"fastapi": ("fastapi", "uvicorn", "prometheus_client"), "flask": ("flask", "gunicorn")}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.real if name == "flask" else ()) for name in SERVERS],
)
def test_server_answers_and_releases_its_models(name: str, run: Run) -> None:
    """uvicorn ends itself by SIGTERM, without exit callbacks.

    In threads_service.py, one model makes room for the other, and SIGTERM closes the loaded one.
    """
    need(*NEEDS.get(name.partition("-")[0], ()))
    command, stop, posts = SERVERS[name]
    with socket.socket() as kept:  # Keeps the port from others; servers set SO_REUSEADDR too.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        client = Client(port, posts)
        report = run(
            *[str(word).replace("PORT", str(port)) for word in command],
            stop_signal=signal.Signals[stop],
            stop_when="GET /stop",
            models=2 if posts is STRICT_AND_KIND else 1,
        )
    client.join(TIMEOUT_S)
    answered = [len(answer) if posts is RATE else 1 for answer in client.answers]
    assert answered == ([2] if posts is RATE else [1, 1]), output_of(report)


GRADIO_CLIENT = """
import sys
from gradio_client import Client
url = f"http://127.0.0.1:{sys.argv[1]}"
print(0 < Client(url, verbose=False).predict("a text", api_name="/rate") < 1)
"""


@pytest.mark.real
def test_gradio_example_releases_its_model_on_sigterm(tmp_path: Path, run: Run) -> None:
    need("gradio")
    port = free_port()
    answers: list[str] = []

    def ask() -> None:
        wait_for(lambda: listens(port))
        command = [sys.executable, "-c", GRADIO_CLIENT, str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        answers.append(done.stdout + done.stderr)
        (tmp_path / "answered").touch()

    asking = threading.Thread(target=ask)
    asking.start()
    program = tmp_path / "gradio_app.py"
    text = program.read_text()
    waiting = """app.launch(server_name="127.0.0.1", server_port=port, prevent_thread_lock=True)
        import os, signal, time
        while not os.path.exists("answered"):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        app.block_thread()"""
    launch = 'app.launch(server_name="127.0.0.1", server_port=port)'
    assert launch in text
    program.write_text(text.replace(launch, waiting))
    report = run(sys.executable, program, str(port), runs=check)
    asking.join(TIMEOUT_S)
    assert answers == ["True\n"], output_of(report)
    assert report.exit_code == 128 + signal.SIGTERM, output_of(report)


STREAMLIT_SESSION = """
import sys
from streamlit.testing.v1 import AppTest
app = AppTest.from_file("streamlit_app.py", default_timeout=600).run()
app.text_input[0].set_value("Go away").run()
assert not app.exception, app.exception
print(app.markdown[0].value)
"""


@pytest.mark.real
def test_streamlit_example_loads_one_model_for_two_runs(tmp_path: Path, run: Run) -> None:
    need("streamlit")
    (tmp_path / "session.py").write_text(STREAMLIT_SESSION)
    report = run(sys.executable, tmp_path / "session.py")
    assert report.stdout.startswith("friendliness: 0."), output_of(report)


CELERY_JOB = """
from celery.signals import worker_ready
from celery_tasks import rate

@worker_ready.connect
def send(**details):
    rate.delay("a text")
"""


@pytest.mark.real
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_celery_example_releases_its_model_in_each_pool(
    pool: str, tmp_path: Path, run: Run
) -> None:
    need("celery")
    (tmp_path / "job.py").write_text(CELERY_JOB)
    run(
        *(BIN / "celery", "-A", "celery_tasks", "worker", "-I", "job", "-l", "INFO"),
        *("-P", pool, "-c", "2"),
        stop_signal=signal.SIGTERM,
        stop_when=r"celery_tasks\.rate\[.*succeeded",
    )


@pytest.mark.real
def test_rq_example_does_two_jobs_with_one_model(tmp_path: Path, run: Run) -> None:
    need("rq")
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("redis-server is not installed: Debian's package redis-server has it")
    from redis import Redis
    from rq import Queue

    port = free_port()
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path))
    with subprocess.Popen([server, *options], stdout=subprocess.DEVNULL) as redis:
        try:
            with Redis(port=port) as connection:
                wait_for(lambda: redis.poll() is not None or listens(port))
                assert redis.poll() is None
                queue = Queue(connection=connection)
                jobs = [queue.enqueue("rq_worker.rate", text) for text in ("a text", "another")]
                report = run(
                    *(BIN / "rq", "worker", "--worker-class", "rq.SimpleWorker"),
                    *("--url", f"redis://127.0.0.1:{port}"),
                    stop_signal=signal.SIGTERM,
                    stop_when=rf"({jobs[1].id}.*OK|OK.*{jobs[1].id}|failed)",
                )
                results = [job.return_value(refresh=True) for job in jobs]
        finally:
            redis.terminate()
    assert [type(result) for result in results] == [float, float], output_of(report)


@pytest.mark.real
@pytest.mark.xdist_group("ray")
def test_ray_example_releases_its_model(tmp_path: Path, run: Run) -> None:
    need("ray")
    report = run(sys.executable, tmp_path / "ray_actor.py")
    assert report.stdout.splitlines()[-1].startswith("0."), output_of(report)
