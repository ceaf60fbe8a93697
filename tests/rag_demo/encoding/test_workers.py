"""`EmbeddingModel(workers=N)`: right vectors or an error, no process left, no hang."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rag_demo import EmbeddingModel, RagDemoError
from support.clean_exit import check
from support.interrupts import Place, interrupt_everywhere
from support.programs import IMPORT_PATH, TIMEOUT_S, assert_clean, run_forked
from support.waiting import is_there, wait_for

TEXTS = [f"{n} the cache" for n in range(23)]
MANY = [f"{n} the cache {'of the city ' * (n % 7)}" for n in range(2000)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, Any]:
    with EmbeddingModel(tiny_model, device="cpu") as alone:
        return dict(zip(MANY, alone.embed_documents(MANY), strict=True))


@pytest.fixture
def model(tiny_model: Path) -> Iterator[EmbeddingModel]:
    with EmbeddingModel(tiny_model, device="cpu", workers=2) as model:
        model.load_model()
        yield model


def children() -> set[int]:
    """Return the processes that this one has started."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> list[int]:
    before = children()
    request.getfixturevalue("model")
    return sorted(children() - before)


def assert_right(model: EmbeddingModel, expected: dict[str, Any], texts: list[str] = MANY) -> None:
    vectors = model.embed_documents(texts)
    assert vectors.shape == (len(texts), model.dimension)
    for text, vector in zip(texts, vectors, strict=True):
        assert np.abs(vector - expected[text]).max() < 1e-3, text


@pytest.mark.slow
def test_workers_return_the_same_vectors(
    workers: list[int], model: EmbeddingModel, expected: dict[str, Any]
) -> None:
    """In the order of the texts, and after unloading too."""
    assert len(workers) == 2
    for count in (0, 1, 2, 3, 2000):
        assert_right(model, expected, MANY[-count:] if count else [])
    model.unload_model()
    assert not any(map(is_there, workers))
    model.load_model()
    assert_right(model, expected, MANY[:9])


@pytest.mark.slow
def test_killed_worker_raises_and_the_next_call_works(
    workers: list[int], model: EmbeddingModel, expected: dict[str, Any]
) -> None:
    """The other worker, which is stopped, ends too."""

    def kill(_: int) -> None:
        os.kill(workers[0], signal.SIGSTOP)
        os.kill(workers[1], signal.SIGKILL)

    with pytest.raises(RagDemoError, match=r"worker ended .*SIGKILL"):
        model.embed_documents(MANY, on_progress=kill)
    assert not any(map(is_there, workers))
    assert_right(model, expected)


@pytest.mark.slow
def test_worker_that_ended_between_calls_is_replaced(
    workers: list[int], model: EmbeddingModel, expected: dict[str, Any]
) -> None:
    os.kill(workers[1], signal.SIGKILL)
    wait_for(lambda: not is_there(workers[1]))
    assert_right(model, expected, MANY[:9])
    assert not any(map(is_there, workers))


@pytest.mark.slow
def test_interrupt_kills_a_stopped_worker(
    workers: list[int], model: EmbeddingModel, expected: dict[str, Any]
) -> None:
    called = threading.Event()

    def stop(_: int) -> None:
        os.kill(workers[0], signal.SIGSTOP)
        called.set()

    def interrupt() -> None:
        called.wait(TIMEOUT_S)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        model.embed_documents(MANY, on_progress=stop)
    helper.join()
    assert not any(map(is_there, workers))
    assert_right(model, expected, MANY[:9])


@pytest.mark.slow
def test_call_after_an_interrupt_returns_its_own_vectors(
    tiny_model: Path, expected: dict[str, Any]
) -> None:
    with EmbeddingModel(tiny_model, device="cpu", workers=1) as model:

        def check(place: Place) -> None:
            model.load_model()
            place.run(lambda: model.embed_documents(MANY[:5]))
            assert_right(model, expected, MANY[7:10])

        interrupt_everywhere(check, package="rag_demo", minimum=10, at_most=15)


@pytest.mark.slow
def test_killed_worker_puts_no_wrong_vector_into_the_cache(
    tiny_model: Path, tmp_path: Path, expected: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"device": "cpu", "cache": tmp_path / "c", "workers": 1}
    with EmbeddingModel(tiny_model, **options) as model:
        before = children()
        model.load_model()
        (worker,) = children() - before
        with pytest.raises(RagDemoError, match="worker ended"):
            model.embed_documents(MANY, on_progress=lambda _: os.kill(worker, signal.SIGKILL))
        assert_right(model, expected)
    with EmbeddingModel(tiny_model, device="cpu", cache=tmp_path / "c") as model:
        assert_right(model, expected)


@pytest.mark.slow
def test_forked_child_starts_its_own_workers(tiny_model: Path) -> None:
    """The child's end does not end the parent's workers."""
    program = """
    import os, sys
    import numpy as np
    from rag_demo import EmbeddingModel
    with EmbeddingModel(sys.argv[1], device="cpu", workers=1) as model:
        expected = model.embed_documents(["the cache", "paris"])
        if os.fork() == 0:
            vectors = model.embed_documents(["paris"])
            ended = model.close()
            os._exit(not np.allclose(vectors, expected[1:], atol=1e-6))
        assert np.allclose(model.embed_documents(["the cache"]), expected[:1], atol=1e-6)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        assert np.allclose(model.embed_documents(["the cache"]), expected[:1], atol=1e-6)
    """
    assert_clean(run_forked(program, str(tiny_model), quick_end=True))


@pytest.mark.slow
def test_model_that_workers_cannot_load_raises(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    before = children()
    with (
        EmbeddingModel(tmp_path, device="cpu", workers=1) as model,
        pytest.raises(RagDemoError, match=f"{tmp_path.name}.* cannot be"),
    ):
        model.load_model()
    assert children() == before
    with pytest.raises(ValueError, match="workers must be 0 or more"):
        EmbeddingModel(tiny_model, workers=-1)


PROGRAM = """
import sys
from rag_demo import EmbeddingModel
model = EmbeddingModel(sys.argv[1], device="cpu", workers=2)
assert model.embed_documents(["the cache", "paris"]).shape[0] == 2
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", pytest.param("model.close()", marks=pytest.mark.slow)])
def test_program_with_workers_exits_cleanly(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """No semaphore, no process and no output on stderr remains."""
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)
    (tmp_path / "program.py").write_text(PROGRAM + end)
    command = [str(tmp_path / "program.py"), str(tiny_model)]
    report = check(command, timeout_s=TIMEOUT_S, max_shutdown_s=120)
    assert report.clean, str(report)
    assert (report.exit_code, report.stderr) == (0, "")
