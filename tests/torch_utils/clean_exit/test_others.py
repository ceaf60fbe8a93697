"""Programs of more than one process: what they say counts, unless it is a quotation for sure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clean_exit.others import OTHERS, PROGRAM, Trio
from hazards.pythons import other_pythons
from torch_utils.clean_exit import ExitReport, check

PYTHONS = {"this": sys.executable, **other_pythons()}
VERSIONS = ["this", *(pytest.param(name, marks=pytest.mark.slow) for name in other_pythons())]
# One of each way to have another process, and of each kind of finding; the rest are slow.
FAST = {
    "unraisable-spawn",
    "unraisable-fork",
    "unraisable-exec-of-itself",
    "unraisable-sub-interpreter",
    "unraisable-alone",
    "unraisable-task-exception",
    "thread-error-exception-group",
    "crash-in-a-shell",
    "crash-fatal-error-of-a-child",
    "leaked-semaphore-silenced",
}


def params(trios: list[Trio]) -> list[Any]:
    return [
        pytest.param(trio, id=str(trio), marks=[] if str(trio) in FAST else [pytest.mark.slow])
        for trio in trios
    ]


def run(trio: Trio, source: str, python: str, folder: Path, command: str = "") -> ExitReport:
    path = folder / "program.py"
    path.write_text(source)
    shell = (command or trio.command).format(python=python, program=path)
    words = [python, str(path)] if (command or trio.command) == PROGRAM else ["sh", "-c", shell]
    return check(words, stdin=subprocess.DEVNULL, timeout_s=120.0)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("trio", params(OTHERS))
def test_dirty_is_caught(trio: Trio, version: str, tmp_path: Path) -> None:
    """The finding is there, and no other kind is."""
    report = run(trio, trio.dirty, PYTHONS[version], tmp_path)
    assert {finding.id for finding in report.findings} == {trio.id}, f"{report}\n{report.stderr}"
    assert report.exit_code != 0


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("trio", params(OTHERS))
def test_clean_twin_is_not(trio: Trio, version: str, tmp_path: Path) -> None:
    """The same program without its fault: no finding, and exit code 0."""
    report = run(trio, trio.clean, PYTHONS[version], tmp_path)
    assert report.clean, f"{report}\n{report.stderr}"
    assert report.exit_code == 0, f"{report}\n{report.stderr}"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("trio", params([trio for trio in OTHERS if trio.quotes]))
def test_quotation_is_not(trio: Trio, version: str, tmp_path: Path) -> None:
    """One process that prints what the dirty one makes others print."""
    report = run(trio, trio.quotes or "", PYTHONS[version], tmp_path, PROGRAM)
    assert report.clean, f"{report}\n{report.stderr}"
    assert report.exit_code == 0
