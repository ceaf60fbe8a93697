"""What people run gets the verdict that it deserves."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clean_exit.real_pools import POOLS
from clean_exit.real_programs import PYTHON, Program, find_command
from clean_exit.real_servers import SERVERS
from clean_exit.real_tools import TOOLS
from torch_utils.clean_exit import check

pytestmark = [pytest.mark.slow, pytest.mark.real]
GROUPS = {
    *("uvicorn", "gunicorn", "celery", "flask", "dask", "ray", "joblib", "scikit-learn"),
    *("DataLoader", "torchrun", "mp.spawn", "accelerate", "sentence-transformers"),
    *("jupyter nbconvert", "coverage", "make", "supervisord", "node", "java"),
}
PROGRAMS = [*SERVERS, *POOLS, *TOOLS]


def test_every_group_has_programs() -> None:
    """And no two programs the same name."""
    assert {program.group for program in PROGRAMS} == GROUPS
    assert len({str(program) for program in PROGRAMS}) == len(PROGRAMS)


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
    program.write(tmp_path)
    environment = {**os.environ, **program.environment, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    if program.group == "sentence-transformers":
        environment["TINY_MODEL"] = str(request.getfixturevalue("tiny_model"))
    first = program.command[0]
    command = [first if first == PYTHON else find_command(first) or first, *program.command[1:]]
    report = check(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        **{"timeout_s": 600.0, "max_shutdown_s": 20.0, **program.options},
    )
    said = f"{report}\n--- stdout\n{report.stdout[-3000:]}\n--- stderr\n{report.stderr[-3000:]}"
    found = {finding.id for finding in report.findings}
    assert found >= program.findings, said
    assert found <= program.findings | program.possible, said
    assert report.exit_code == program.exit_code, said
