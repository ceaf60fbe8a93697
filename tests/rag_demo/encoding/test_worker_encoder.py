"""Embedding in several processes: the same vectors, no leak, no hang."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rag_demo import EmbeddingModel
from rag_demo.errors import ModelError
from torch_utils.clean_exit import check

TEXTS = [f"the cache number {n} " * (1 + n % 5) for n in range(23)]


def pids(model: EmbeddingModel) -> list[int]:
    return [worker.pid for worker in model._encoder._workers]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_same_vectors_and_gone_afterwards(tiny_model: Path) -> None:
    """In the order of the texts, whatever their number; processes go with the model."""
    with EmbeddingModel(tiny_model, device="cpu") as alone:
        expected = alone.embed_documents(TEXTS)
    with EmbeddingModel(tiny_model, device="cpu", workers=2) as model:
        assert np.abs(model.embed_documents(TEXTS) - expected).max() < 1e-6
        assert np.abs(model.embed_documents(TEXTS[:1]) - expected[:1]).max() < 1e-6
        assert model.embed_documents([]).shape == (0, model.dimension)
        started = pids(model)
        assert len(started) == 2
        model.unload_model()
        assert not any(map(alive, started))
        model.load_model()
        started = pids(model)
        assert np.abs(model.embed_documents(TEXTS) - expected).max() < 1e-6
    assert not any(map(alive, started))


def test_crashed_worker_is_an_error(tiny_model: Path) -> None:
    """In the middle of its work, or before: one error, no hang, and the others go too."""
    with EmbeddingModel(tiny_model, device="cpu", workers=2) as model:
        model.load_model()
        first, second = pids(model)
        os.kill(first, signal.SIGSTOP)
        killer = threading.Timer(0.5, lambda: os.kill(first, signal.SIGKILL))
        killer.start()
        with pytest.raises(ModelError, match=r"an embedding worker ended .*signal 9"):
            model.embed_documents(TEXTS)
        killer.join()
        assert not alive(second)


def test_errors_come_back(tmp_path: Path, tiny_model: Path) -> None:
    """A model that cannot be loaded, and wrong counts."""
    damaged = shutil.copytree(tiny_model, tmp_path / "m")
    (damaged / "model.safetensors").write_bytes(b"\x08")
    with (
        EmbeddingModel(damaged, device="cpu", workers=1) as model,
        pytest.raises(ModelError, match="cannot be loaded"),
    ):
        model.load_model()
    with pytest.raises(ValueError, match="workers must be 0 or more"):
        EmbeddingModel(tiny_model, workers=-1)


PROGRAM = """
import sys
from rag_demo import EmbeddingModel
model = EmbeddingModel(sys.argv[1], device="cpu", workers=2)
assert model.embed_documents(["the cache", "paris"]).shape[0] == 2
{end}
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        pytest.param("model.close()", marks=pytest.mark.slow),
        pytest.param("raise SystemExit(0)", marks=pytest.mark.slow),
    ],
)
def test_leaves_cleanly(tiny_model: Path, tmp_path: Path, end: str) -> None:
    """Closed or left open: no semaphore, no process, nothing on stderr."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end))
    report = check([str(program), str(tiny_model)], timeout_s=600)
    assert report.clean, str(report)
    assert (report.exit_code, report.stderr) == (0, "")


def test_workers_leave_when_their_parent_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    """They read the end of their stdin, and go; when, is up to the machine."""
    end = """
import os
print(*(worker.pid for worker in model._encoder._workers), flush=True)
os.kill(os.getpid(), 9)
"""
    command = [sys.executable, "-c", PROGRAM.format(end=end), str(tiny_model)]
    # Not through pipes: the workers hold these as well, and would be waited for.
    with (tmp_path / "out").open("w") as out:
        assert subprocess.run(command, stdout=out, check=False).returncode == -9
    workers = [int(pid) for pid in (tmp_path / "out").read_text().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 600
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, workers))


@pytest.mark.slow
def test_control_the_usual_pool_leaks(tiny_model: Path, tmp_path: Path) -> None:
    """sentence-transformers' own pool leaves a semaphore behind although it is stopped."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import sys
from sentence_transformers import SentenceTransformer
if __name__ == "__main__":
    model = SentenceTransformer(sys.argv[1], device="cpu")
    pool = model.start_multi_process_pool(["cpu"])
    model.encode(["the cache"], pool=pool)
    model.stop_multi_process_pool(pool)
"""
    )
    report = check([str(program), str(tiny_model)], timeout_s=600)
    assert "leaked-semaphore" in [finding.id for finding in report.findings], str(report)
