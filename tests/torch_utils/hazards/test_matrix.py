"""Every row of the matrix: silent, the right exit code, and released exactly once."""

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.other_pythons import other_pythons
from tests.support.programs import run, run_forked
from tests.torch_utils.hazards.endings import ENDINGS
from tests.torch_utils.hazards.holders import PLACES
from tests.torch_utils.hazards.processes import PROCESSES
from tests.torch_utils.hazards.row import ALL, Row
from tests.torch_utils.hazards.torch_states import TORCH_STATES

THEMES = [PLACES, ENDINGS, TORCH_STATES, PROCESSES]
CONTROLS = [row for theme in THEMES for row in theme if row.control]
PRELUDE = "from tests.torch_utils.hazards.subjects import close, is_alive, log, make\n"
PYTHONS = {"this Python": sys.executable, **other_pythons()}


def _params() -> list[Any]:
    """`make test` runs each hazard once, with the first of its subjects on this Python.

    The other Pythons have no torch. There a resource stands for the other subjects, which are made
    of one, but for two rows of each theme.
    """
    found = []
    for theme in THEMES:
        for version, subject in itertools.product(PYTHONS, ALL):
            rows = [row for row in theme if subject in row.subjects]
            if version != "this Python":
                rows = [row for row in rows if not row.needs_torch and subject != "retriever"]
                rows = rows if subject == "resource" else rows[:2]
            for row in rows:
                is_quick = version == "this Python" and subject == row.subjects[0]
                marks = [] if is_quick and not row.is_variation else [pytest.mark.slow]
                if row.needs_torch or subject == "retriever":
                    # In one worker, which then imports torch once.
                    marks.append(pytest.mark.xdist_group("hazards"))
                name = f"{row.name}-{subject}-{version}"
                found.append(pytest.param(row, subject, version, id=name, marks=marks))
    return found


def _problems(row: Row, subject: str, python: str, folder: Path) -> list[str]:
    """Run the program of a row; return what is wrong, and its output."""
    log, program = folder / "log", PRELUDE + row.program
    env = {"HAZARD_SUBJECT": subject, "HAZARD_LOG": str(log)}
    env |= {"HAZARD_LATE": "1"} if row.late else {}
    if (row.needs_torch or subject == "retriever") and not (row.own_process or row.options):
        result = run_forked(program, env=env)
    else:
        result = run(program, python=python, options=row.options, env=env, as_file=True)
    found: list[str] = []
    if result.returncode != row.returncode:
        found.append(f"exit code {result.returncode}, not {row.returncode}")
    if not re.fullmatch(row.stderr, result.stderr):
        found.append(f"stderr does not match {row.stderr!r}")
    events = log.read_text().splitlines() if log.exists() else []
    made = [event.removeprefix("made ") for event in events if event.startswith("made")]
    released = [event.removeprefix("released ") for event in events if event.startswith("released")]
    if not made or sorted(released) != sorted(made * row.released):
        found.append(f"made {made}, but released {released}")
    if any(event.startswith("alive") and not event.endswith("True") for event in events):
        found.append("was closed before the program's own atexit callback")
    return [*found, f"{row.program}\n{result}"] if found else []


@pytest.mark.parametrize(("row", "subject", "version"), _params())
def test_released_exactly_once_and_silent(
    row: Row, subject: str, version: str, tmp_path: Path
) -> None:
    problems = _problems(row, subject, PYTHONS[version], tmp_path)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("row", CONTROLS, ids=lambda row: row.name)
def test_naive_destructor_falls_short(row: Row, tmp_path: Path) -> None:
    assert _problems(row, "naive", sys.executable, tmp_path), row.program
