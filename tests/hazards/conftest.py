"""Fixtures of the matrix; what reports on it is the plugin `summary`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hazards.runner import Runner


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.close()
