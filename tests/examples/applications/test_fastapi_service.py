"""A FastAPI service under uvicorn, with a model that is loaded on demand."""

from __future__ import annotations

import signal
import sys
from typing import Any

import httpx
import pytest

from tests.examples.applications.harness import PROGRAMS, facts_of, started

UVICORN = ("-m", "uvicorn", "fastapi_service:app", "--app-dir", str(PROGRAMS))
OPTIONS = ("--host", "127.0.0.1", "--port", "0", "--no-access-log")
WORDS = [3, 1, 4, 1, 5]


def check(
    rounds: int = 1,
    mutant: str | None = None,
    python: str = sys.executable,
    loop: str = "auto",
) -> None:
    """Load, answer and unload; another model and the background tasks go on."""
    answers: list[Any] = []
    command = (python, *UVICORN, *OPTIONS, "--loop", loop)
    with started(*command, mutant=mutant) as service:
        url = service.wait_for_output(r"running on (http://127\.0\.0\.1:[0-9]+)")[1]
        with httpx.Client(base_url=url, timeout=120) as client:

            def post(path: str, content: Any = None) -> Any:
                return client.post(path, json=content).raise_for_status().json()

            try:
                tags = post("/tag", WORDS)
                for _ in range(rounds):
                    answers.append(post("/rank", WORDS))
                    unloaded = post("/unload")
                    assert unloaded["alive_mb"] == 0
                    assert unloaded["grown_mb"] < 35
                    assert post("/tag", WORDS) == tags
                assert unloaded["closed"] == rounds
                assert unloaded["beats"] > 1
                answers.append(post("/rank", WORDS))  # The lifespan closes this one.
            except httpx.HTTPStatusError as error:
                raise AssertionError(str(error)) from error
        service.process.send_signal(signal.SIGTERM)
        done = service.wait()
    # uvicorn ends itself by the signal, and logs to stderr.
    assert done.returncode == -signal.SIGTERM, str(done)
    assert all(line.startswith("INFO:") for line in done.stderr.splitlines()), str(done)
    stopped = facts_of(done.stdout)["stopped"]
    assert answers == [answers[0]] * (rounds + 1)
    assert stopped["closed"] == rounds + 1
    assert stopped["events"] == 2 * rounds + 2
    assert stopped["alive_mb"] == 0
    assert stopped["grown_mb"] < 35


def test_unloads_between_requests_and_at_the_end() -> None:
    check()


@pytest.mark.slow
def test_memory_stays_flat_over_rounds() -> None:
    check(rounds=4)


@pytest.mark.slow
def test_works_the_same_under_uvloop(applications_python: str) -> None:
    check(python=applications_python, loop="uvloop")


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["leak", "break_sharing", "skip_destructor"])
def test_sees_a_broken_product(mutant: str) -> None:
    with pytest.raises(AssertionError):
        check(mutant=mutant)
