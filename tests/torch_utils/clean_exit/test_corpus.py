"""Every dirty program is caught, by its finding; every clean twin is not; on every Python."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from clean_exit.corpus import CLEAN, CORPUS, HANGS, NO_PROBE, SLOW, Pair
from hazards.pythons import other_pythons
from torch_utils.clean_exit import FINDINGS, ExitReport, check

PYTHONS = {"this": sys.executable, **other_pythons()}
VERSIONS = ["this", *(pytest.param(name, marks=pytest.mark.slow) for name in other_pythons())]
FIRST = {pair.id: pair for pair in reversed(CORPUS)}


def _marks(pair: Pair) -> list[pytest.MarkDecorator]:
    # Of each finding one is in `make test`.
    marks = [] if FIRST[pair.id] is pair else [pytest.mark.slow]
    if pair.options in (HANGS, SLOW):  # They are run at once, so one worker has to have them all.
        marks.append(pytest.mark.xdist_group("waiting"))
    return marks


PAIRS = [pytest.param(pair, id=str(pair), marks=_marks(pair)) for pair in CORPUS]
HELPER = "import os\n\ndef check():\n    return os.path.exists(None)\n"
WITHOUT_PROGRAMS = {"gpu-memory-held"}  # needs a GPU; see test_findings.py


def run(pair: Pair, which: str, python: str, folder: Path) -> ExitReport:
    path = folder / f"{which}.py"
    path.write_text(pair.source(which))
    (folder / "helper_of_test.py").write_text(HELPER)
    command = [*pair.prefix, python, *pair.flags, str(path)]
    options = {"timeout_s": 60.0, **pair.options}
    if which == "clean":
        options["timeout_s"] = 60.0  # Only what hangs has to wait for the end of its time.
    return check(command, stdin=subprocess.DEVNULL, **options)


@functools.cache
def run_those_that_wait(version: str, is_first: bool) -> dict[tuple[str, str], ExitReport]:
    """Run the programs that do nothing for seconds, at once; the first ones or the rest."""
    waiting = [pair for pair in CORPUS if pair.options in (HANGS, SLOW)]
    with TemporaryDirectory() as folder, ThreadPoolExecutor(6) as executor:
        started = {}
        for pair in (pair for pair in waiting if (FIRST[pair.id] is pair) == is_first):
            for which in ("dirty", "clean"):
                own = Path(folder, f"{pair}-{which}")
                own.mkdir()
                started[str(pair), which] = executor.submit(run, pair, which, PYTHONS[version], own)
        return {key: future.result() for key, future in started.items()}


def report_on(pair: Pair, which: str, version: str, folder: Path) -> ExitReport:
    if pair.options in (HANGS, SLOW):
        return run_those_that_wait(version, FIRST[pair.id] is pair)[str(pair), which]
    return run(pair, which, PYTHONS[version], folder)


def test_every_finding_has_a_program() -> None:
    """No finding id without a dirty program that shows it."""
    assert {pair.id for pair in CORPUS} == set(FINDINGS) - WITHOUT_PROGRAMS


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pair", PAIRS)
def test_dirty_is_caught(pair: Pair, version: str, tmp_path: Path) -> None:
    """The finding is there, with a summary, and nothing else is."""
    report = report_on(pair, "dirty", version, tmp_path)
    assert {finding.id for finding in report.findings} == {pair.id}, str(report)
    assert report.exit_code != 0
    for name in re.findall(r"psm_\w+", str(report)):  # What was left is left: nobody else's task.
        Path("/dev/shm", name).unlink(missing_ok=True)
    assert report.probed == (pair.prefix != NO_PROBE), str(report)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pair", PAIRS)
def test_clean_twin_is_not(pair: Pair, version: str, tmp_path: Path) -> None:
    """The same program without its fault: no finding, and exit code 0."""
    report = report_on(pair, "clean", version, tmp_path)
    assert report.clean, f"{report}\n{report.stderr}"
    assert report.exit_code == 0, f"{report}\n{report.stderr}"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CLEAN)
def test_no_false_alarm(name: str, version: str, tmp_path: Path) -> None:
    """Programs that only look dirty."""
    pair = Pair("unraisable", name, "", CLEAN[name])
    report = run(pair, "clean", PYTHONS[version], tmp_path)
    assert report.clean, f"{report}\n{report.stderr}"


def test_exit_code_alone_tells_nothing(tmp_path: Path) -> None:
    """The control: of these programs most say 0, which is why there is a checker."""
    silent = [pair for pair in CORPUS if pair.id in ("unraisable", "atexit-error", "thread-error")]
    for pair in silent:
        path = tmp_path / f"{pair}.py"
        path.write_text(pair.source("dirty"))
        (tmp_path / "helper_of_test.py").write_text(HELPER)
        done = subprocess.run(
            [sys.executable, *pair.flags, str(path)], capture_output=True, check=False
        )
        assert done.returncode == 0, pair


@pytest.mark.slow
def test_200_clean_runs_under_load(tmp_path: Path) -> None:
    """More runs at once than cores, beside busy processes: no alarm."""
    burners = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 2)
    ]
    names = ["prints", "uses real finalizers", "has a daemon thread", "prints a caught traceback"]
    pairs = [Pair("unraisable", name, "", CLEAN[name]) for name in names]
    pairs.append(next(pair for pair in CORPUS if pair.id == "leaked-shared-memory"))

    def once(number: int) -> ExitReport:
        folder = tmp_path / str(number)
        folder.mkdir()
        return run(pairs[number % len(pairs)], "clean", sys.executable, folder)

    try:
        with ThreadPoolExecutor(8) as executor:
            reports = list(executor.map(once, range(200)))
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    alarms = [report for report in reports if not report.clean or report.exit_code]
    assert not alarms, "\n".join(map(str, alarms))
