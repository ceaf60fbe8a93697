"""Every dirty program is caught, by its finding; every clean twin is not; on every Python."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from clean_exit import FINDINGS, ExitReport, check
from tests.clean_exit.exits.corpus import CLEAN, CORPUS, Pair
from tests.support.other_pythons import other_pythons

PYTHONS = {"this": sys.executable, **other_pythons()}
FIRST = {pair.id: pair for pair in reversed(CORPUS)}
# Of each finding one, and of each way to have another process: they run on every Python. The rest
# run on this Python, the oldest and the newest.
SAMPLES = {
    *map(str, FIRST.values()),
    "unraisable-spawn",
    "unraisable-fork",
    "unraisable-exec-of-itself",
    "unraisable-task-exception",
    "crash-in-a-shell",
    "crash-of-a-child",
    "leaked-semaphore-silenced",
}
# `make test` has the first of each finding, but for those that wait for seconds: test_check.py and
# test_processes.py have these.
WAIT = {"hang", "slow-shutdown", "orphan-process"}


def _cases() -> list[object]:
    others = sorted(other_pythons(), key=lambda name: int(name.partition(".")[2]))
    cases = []
    for pair in CORPUS:
        versions = others if str(pair) in SAMPLES else {*others[:1], *others[-1:]}
        for version in ("this", *sorted(versions)):
            is_quick = FIRST[pair.id] is pair and pair.id not in WAIT and version == "this"
            marks = [] if is_quick else [pytest.mark.slow]
            cases.append(pytest.param(pair, version, id=f"{pair}-{version}", marks=marks))
    return cases


def run(pair: Pair, which: str, version: str, folder: Path) -> ExitReport:
    path = folder / "program.py"
    path.write_text(pair.source(which))
    options = {**pair.options}
    if which == "clean":
        options["timeout_s"] = 120.0  # Only what hangs has to wait for the end of its time.
    return check(pair.line(PYTHONS[version], str(path)), stdin=subprocess.DEVNULL, **options)


def test_every_finding_has_a_program() -> None:
    needs_pytest = {"unfinished-tests"}  # in tests/clean_exit/test_pytest_plugin.py
    assert set(FIRST) == set(FINDINGS) - needs_pytest
    assert SAMPLES <= {str(pair) for pair in CORPUS}


@pytest.mark.parametrize(("pair", "version"), _cases())
def test_dirty_program_is_caught_and_its_clean_twin_is_not(
    pair: Pair, version: str, tmp_path: Path
) -> None:
    """The finding is there, and no other kind is; without the fault the report is clean."""
    report = run(pair, "dirty", version, tmp_path)
    assert {finding.id for finding in report.findings} == {pair.id}, f"{report}\n{report.stderr}"
    assert report.exit_code != 0
    for name in re.findall(r"psm_\w+", str(report)):  # What was left is left: nobody else's task.
        Path("/dev/shm", name).unlink(missing_ok=True)
    if not pair.command:
        assert report.probed, str(report)
    report = run(pair, "clean", version, tmp_path)
    assert (report.clean, report.exit_code) == (True, 0), f"{report}\n{report.stderr}"


@pytest.mark.parametrize(
    "version", ["this", *(pytest.param(name, marks=pytest.mark.slow) for name in other_pythons())]
)
@pytest.mark.parametrize("name", CLEAN)
def test_what_only_looks_dirty_is_clean(name: str, version: str, tmp_path: Path) -> None:
    report = run(Pair("", name, CLEAN[name]), "clean", version, tmp_path)
    assert report.clean, f"{report}\n{report.stderr}"
