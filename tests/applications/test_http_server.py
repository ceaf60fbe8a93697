"""A threaded server that loads and releases a model in each request."""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from applications.harness import PROGRAMS, started
from support.programs import assert_clean

IDS = [2, 7, 1, 8]


def check(rounds: int = 2, mutant: str | None = None) -> None:
    """Two requests at a time get the same answers in each round, and leave no memory behind."""
    languages = ["1", "2"] * rounds
    with started(sys.executable, str(PROGRAMS / "http_server.py"), mutant=mutant) as service:
        port = service.wait_for_output(r'{"port": ([0-9]+)}')[1]
        url = f"http://127.0.0.1:{port}"

        def post(path: str) -> Any:
            return httpx.post(f"{url}/{path}", json=IDS, timeout=120).raise_for_status().json()

        try:
            words = post("words")
            with ThreadPoolExecutor(2) as clients:
                answers = list(clients.map(post, languages))
            facts = httpx.get(url, timeout=120).raise_for_status().json()
            assert post("words") == words
        except httpx.HTTPError as error:
            raise AssertionError(str(error)) from error
        service.process.send_signal(signal.SIGTERM)
        assert_clean(service.wait(), 128 + signal.SIGTERM)
    assert facts["alive_mb"] == 0
    assert facts["grown_mb"] < 60, "two models at a time have 126 MB"
    assert sorted(facts["closed"]) == sorted(languages)
    assert answers == answers[:2] * rounds
    assert answers[0] != answers[1]


@pytest.mark.slow
def test_models_of_requests_are_freed() -> None:
    check()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", ["leak", "break_sharing", "skip_destructor"])
def test_sees_a_broken_product(mutant: str) -> None:
    with pytest.raises(AssertionError):
        check(mutant=mutant)
