"""Embedding in several processes: the texts' own vectors or an error, no leak, no hang."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from interrupts import everywhere, run_interrupted
from stub_worker import StubWorker, vectors_of

from programs import IMPORT_PATH, ROOT, TIMEOUT_S
from rag_demo import EmbeddingModel
from rag_demo.encoding import worker_encoder
from rag_demo.errors import ModelError
from torch_utils.clean_exit import check

TEXTS = [f"{n} the cache" for n in range(23)]


@pytest.fixture
def stub(monkeypatch, tmp_path: Path):
    """Make models whose workers have a stub for an encoder: they start in no time."""
    monkeypatch.setattr(worker_encoder, "Worker", StubWorker)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").touch()
    opened = []

    def make(**options) -> EmbeddingModel:
        opened.append(EmbeddingModel(folder, device="cpu", **{"workers": 2, **options}))
        return opened[-1]

    yield make
    for model in opened:
        model.close()


def pids(model: EmbeddingModel) -> list[int]:
    return [worker.pid for worker in model._encoder._workers]


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def assert_right(model: EmbeddingModel, texts=TEXTS) -> None:
    assert np.array_equal(model.embed_documents(texts), vectors_of(texts))


def test_in_the_order_of_the_texts(stub) -> None:
    """Whatever their number; more than one slice of them; what was cut off is counted."""
    model = stub(workers=3)
    for count in (0, 1, 2, 3, 23, 2000):
        texts = [f"{n} of {count}" + "x" * (n % 30) for n in range(count)]
        assert_right(model, texts)
    assert model._encoder.truncated > 0
    started = pids(model)
    model.unload_model()
    assert not any(map(is_there, started))
    model.load_model()
    assert_right(model)


def test_the_models_own_vectors(tiny_model: Path) -> None:
    """With a real encoder: the same as without workers."""
    with EmbeddingModel(tiny_model, device="cpu") as alone:
        expected = alone.embed_documents(TEXTS)
    with EmbeddingModel(tiny_model, device="cpu", workers=1) as model:
        assert np.abs(model.embed_documents(TEXTS) - expected).max() < 1e-6


@pytest.mark.parametrize("when", [pytest.param("exits", marks=pytest.mark.slow), "is killed"])
def test_worker_that_ends(stub, tmp_path: Path, when: str) -> None:
    """An error that says how, never other vectors; the others go too, and the next call is right.

    With many slices, so that some were embedded, and cached, before.
    """
    cache = tmp_path / "cache.sqlite"
    model = stub(cache=cache)
    assert_right(model)
    begun = tmp_path / "begun"
    texts = [f"{n} and more of it" for n in range(2000)]
    texts[700] = f"{'exit' if when == 'exits' else 'sleep'} {begun}"

    def kill() -> None:
        wait_for(begun)
        for pid in started if when == "is killed" else ():
            os.kill(pid, signal.SIGKILL)

    started = pids(model)
    helper = threading.Thread(target=kill)
    helper.start()
    with pytest.raises(ModelError, match=r"worker ended .*(exit code 5|SIGKILL)"):
        model.embed_documents(texts)
    helper.join()
    assert not any(map(is_there, started))
    assert_right(model, texts)
    assert_right(stub(cache=cache, workers=1), texts)
    model.close()
    database = sqlite3.connect(cache)
    kept = {data for (data,) in database.execute("SELECT vector FROM vectors")}
    database.close()
    assert kept == {row.tobytes() for row in vectors_of([*TEXTS, *texts])}


@pytest.mark.parametrize("which", [0, 1])
def test_the_end_of_one_is_seen_at_once(stub, tmp_path: Path, which: int) -> None:
    """Whichever it is, although the others are busy for ten minutes."""
    model = stub(workers=2)
    model.load_model()
    started = pids(model)
    begun = [tmp_path / name for name in ("one", "two")]

    def kill() -> None:
        for path in begun:
            wait_for(path)
        os.kill(started[which], signal.SIGKILL)

    helper = threading.Thread(target=kill)
    helper.start()
    with pytest.raises(ModelError, match=r"worker ended .*SIGKILL"):
        model.embed_documents([f"sleep {path}" for path in begun])
    helper.join()
    assert not any(map(is_there, started))


def test_worker_that_ended_before(stub) -> None:
    """Seen before anything is asked: new ones are started, and nobody notices."""
    model = stub()
    assert_right(model)
    started = pids(model)
    os.kill(started[1], signal.SIGKILL)
    os.waitid(os.P_PID, started[1], os.WEXITED | os.WNOWAIT)
    assert_right(model)
    assert not set(started) & set(pids(model))
    assert not any(map(is_there, started))


def test_interrupts_never_shift_vectors(stub) -> None:
    """At any instruction of the call: the next one's vectors are its own texts'."""
    model = stub(workers=2)
    assert_right(model)
    ended = 0

    def interrupt(number: int) -> bool:
        nonlocal ended
        before = pids(model)
        is_over, arrived = run_interrupted(
            lambda: model.embed_documents([f"A{number}"] * 5), number, "encoding/worker_encoder.py"
        )
        assert_right(model, [f"B{number}", "C", "D"])
        ended += arrived and pids(model) != before
        return is_over

    everywhere(interrupt, step=131)
    assert ended > 0


def test_interrupt_ends_the_workers_at_once(stub, tmp_path: Path) -> None:
    """They are killed, not waited for, although one is busy for ten minutes."""
    model = stub()
    model.load_model()
    started = pids(model)
    begun = tmp_path / "begun"

    def interrupt() -> None:
        wait_for(begun)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        model.embed_documents([*TEXTS, f"sleep {begun}"])
    helper.join()
    assert not any(map(is_there, started))
    assert_right(model)


def test_fork_has_workers_of_its_own(stub) -> None:
    """Nothing is shared: both embed, and the fork's end does not end the parent's."""
    model = stub()
    assert_right(model)
    started = pids(model)
    if os.fork() == 0:
        status = 1
        try:
            assert_right(model, [f"child {n}" for n in range(9)])
            assert not set(pids(model)) & set(started)
            model._encoder.close()
            status = 0
        finally:
            os._exit(status)
    assert_right(model, [f"parent {n}" for n in range(9)])
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    assert pids(model) == started
    assert_right(model)


def test_errors_of_encoders(stub) -> None:
    """Less memory at a time, by the same workers; a wrong answer; a model that cannot be loaded."""
    model = stub()
    model.load_model()
    started = pids(model)
    assert_right(model, [*TEXTS, "memory is short"])
    assert pids(model) == started
    with pytest.raises(ModelError, match=r"answered with float32\[1, 8\] to 12 texts"):
        model.embed_documents([*TEXTS, "shape"])
    assert_right(model)
    with pytest.raises(ModelError, match="cannot be loaded"):
        stub(dtype="bfloat16").load_model()
    with pytest.raises(ValueError, match="workers must be 0 or more"):
        stub(workers=-1)


PROGRAM = """
import sys
from stub_worker import StubWorker
from rag_demo import EmbeddingModel
from rag_demo.encoding import worker_encoder
worker_encoder.Worker = StubWorker
model = EmbeddingModel(sys.argv[1], device="cpu", workers=2)
assert model.embed_documents(["the cache", "paris"]).shape[0] == 2
{end}
"""


@pytest.mark.parametrize("end", ["model.close()", "", "raise SystemExit(0)"])
def test_leaves_cleanly(tmp_path: Path, monkeypatch, end: str) -> None:
    """Closed or left open: no semaphore, no process, nothing on stderr."""
    path = os.pathsep.join([IMPORT_PATH, str(ROOT / "tests" / "rag_demo")])
    monkeypatch.setenv("PYTHONPATH", path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(end=end))
    (tmp_path / "config.json").touch()
    report = check([str(program), str(tmp_path)], timeout_s=TIMEOUT_S, max_shutdown_s=120)
    assert report.clean, str(report)
    assert (report.exit_code, report.stderr) == (0, "")


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
    report = check([str(program), str(tiny_model)], timeout_s=600, max_shutdown_s=120)
    assert "leaked-semaphore" in [finding.id for finding in report.findings], str(report)
