"""Models in Celery's workers."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.examples.applications.harness import PROGRAMS, facts_of, run_application, started
from tests.support.waiting import is_there, wait_for

pytestmark = pytest.mark.slow  # The worker and its client import torch and Celery.

WORKER = ("-m", "celery", "--workdir", str(PROGRAMS), "-A", "celery_application", "worker")
OPTIONS = ("--loglevel", "INFO", "--concurrency", "2", "--without-gossip", "--without-mingle")


def check(
    python: str, folder: Path, monkeypatch: pytest.MonkeyPatch, pool: str, mutant: str | None = None
) -> None:
    """Load and unload in tasks, keep a model, and stop the worker."""
    for name in ("results", "messages", "control"):
        (folder / name).mkdir()
    monkeypatch.setenv("CELERY_FOLDER", str(folder))
    with started(python, *WORKER, *OPTIONS, "--pool", pool, mutant=mutant) as worker:
        worker.wait_for_output("celery@.* ready")
        try:
            client = run_application("celery_application", "3", python=python)
        finally:
            worker.process.send_signal(signal.SIGTERM)  # A warm shutdown.
            done = worker.wait()
    assert done.returncode == 0, str(done)
    assert not re.search("Traceback|ERROR|CRITICAL", done.stderr), str(done)
    answers: list[Any] = client["answers"]
    for unloaded in client["unloaded"]:
        assert unloaded["alive_mb"] == 0
        assert unloaded["grown_mb"] < 35
        assert unloaded["tags"] == client["tags"]
        answers.append(unloaded["answer"])
    assert answers == [answers[0]] * len(answers)
    facts = facts_of(done.stdout)
    pids = [name.removeprefix("loaded_") for name in facts if name.startswith("loaded_")]
    assert pids
    assert (str(worker.process.pid) in pids) == (pool == "solo")
    for pid in pids:
        assert facts.get(f"closed_{pid}") == facts[f"loaded_{pid}"], facts
        wait_for(lambda: not is_there(int(pid)))


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_each_process_releases_its_models(
    applications_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    check(applications_python, tmp_path, monkeypatch, pool)


@pytest.mark.parametrize("mutant", ["leak", "break_sharing", "skip_destructor"])
def test_sees_a_broken_product(
    applications_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    with pytest.raises(AssertionError):
        check(applications_python, tmp_path, monkeypatch, "prefork", mutant)
