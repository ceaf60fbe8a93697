"""A real server whose model is replaced under traffic."""

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.programs import IMPORT_PATH, free_port
from tests.support.threads import errors_in_threads
from tests.support.waiting import wait_for

for package in ("torch", "fastapi", "uvicorn", "httpx"):
    pytest.importorskip(package, reason=f"needs {package}: the extras model and service")

import httpx  # noqa: E402

pytestmark = pytest.mark.slow

SERVICE = """
import gc, torch, weakref
from fastapi import FastAPI, Request
from functools import partial
from torch_utils import ModelHost
from torch_utils.fastapi import lifespan

made = []

def load(version):
    model = torch.nn.Linear(100, 100, bias=False)
    torch.nn.init.constant_(model.weight, version)
    made.append(weakref.ref(model.weight.untyped_storage()))
    return model

def answer(model):
    (value,) = set(model(torch.ones(100)).tolist())
    return round(value / 100)

@lifespan
async def models(app, scope):
    yield {"host": scope.manage(ModelHost(partial(load, 0)))}

app = FastAPI(lifespan=models)

@app.get("/answer")
async def get_answer(request: Request) -> int:
    return await request.state.host.call(answer, timeout_s=60)

@app.get("/answer_in_thread")
def get_answer_in_thread(request: Request) -> int:
    with request.state.host.lease(timeout_s=60) as model:
        return answer(model)

@app.post("/version/{number}")
async def change_version(number: int, overlap: bool, request: Request) -> bool:
    return await request.state.host.areplace(partial(load, number), overlap=overlap, timeout_s=60)

@app.get("/models")
async def count_models() -> int:
    gc.collect()
    return sum(one() is not None for one in made)
"""


@pytest.mark.parametrize(("overlap", "swaps"), [(True, 300), (False, 100)])
def test_no_request_fails_while_versions_change(overlap: bool, swaps: int, tmp_path: Path) -> None:
    """Answers never go back to an older version, and one model remains."""
    (tmp_path / "service.py").write_text(SERVICE)
    port, log, done = free_port(), tmp_path / "log", threading.Event()
    command = [sys.executable, "-m", "uvicorn", "service:app", f"--port={port}", "--no-access-log"]
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH, "OMP_NUM_THREADS": "1"}
    answers: list[int] = []

    def ask(path: str) -> None:
        last = 0
        while not done.is_set():
            response = client.get(path)
            assert response.status_code == 200, response.text
            assert last <= response.json()
            last = response.json()
            answers.append(last)

    def swap() -> None:
        try:
            for number in range(1, swaps + 1):
                response = client.post(f"/version/{number}", params={"overlap": overlap})
                assert (response.status_code, response.json()) == (200, True)
                time.sleep(0.001)
        finally:
            done.set()

    with (
        log.open("w") as out,
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=100) as client,
    ):
        try:
            wait_for(lambda: "startup complete" in log.read_text())
            assert client.get("/answer").json() == 0
            asks = [partial(ask, path) for path in ("/answer", "/answer_in_thread") * 8]
            assert errors_in_threads(*asks, swap) == [], log.read_text()
            assert client.get("/answer").json() == swaps
            wait_for(lambda: client.get("/models").json() == 1)
        finally:
            server.terminate()
    assert len(set(answers)) > swaps / 10
    assert "Traceback" not in log.read_text()
