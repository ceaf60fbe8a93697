"""What people run gets the verdict that it deserves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clean_exit.exits.real_pools import POOLS
from tests.clean_exit.exits.real_programs import Program, is_right, run
from tests.clean_exit.exits.real_servers import SERVERS
from tests.clean_exit.exits.real_tools import TOOLS

pytestmark = [pytest.mark.slow, pytest.mark.real]
PROGRAMS = [*SERVERS, *POOLS, *TOOLS]


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and programs would inherit that."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_verdict(program: Program, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Its findings, and nothing but them; its exit code."""
    missing = program.missing()
    if missing:
        pytest.skip(f"{program.group}: {missing} is not installed")
    needs_model = program.group == "sentence-transformers"
    model = request.getfixturevalue("tiny_model") if needs_model else None
    report = run(program, tmp_path, model)
    said = f"{report}\n--- stdout\n{report.stdout[-3000:]}\n--- stderr\n{report.stderr[-3000:]}"
    assert is_right(program, report), said
