"""Fixtures of the matrix; what reports on it is the plugin `summary`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hazards.runner import Runner


@pytest.fixture(scope="session")
def runner(tiny_model: Path) -> Iterator[Runner]:
    runner = Runner(tiny_model)
    yield runner
    runner.close()
