"""When the time is up no new test is taken, and what has run decides."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from deadline import VARIABLE

from programs import ROOT
from zygotes import IMPORT_PATH

HOURS = 36000
TESTS = {
    "test_ends_well": "def test_one(): pass\ndef test_two(): pass",
    "test_fails": "def test_three(): assert False",
}


def run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, left_s: float, *options: str
) -> pytest.RunResult:
    """Run in a folder where nothing else of ours is configured."""
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)
    monkeypatch.setenv(VARIABLE, str(time.time() + left_s))
    return pytester.runpytest_subprocess("-p", "deadline", "-p", "no:cacheprovider", *options)


@pytest.mark.parametrize(
    "options", [[], pytest.param(["-n", "2"], marks=pytest.mark.slow)], ids=["alone", "xdist"]
)
def test_no_test_is_taken_when_the_time_is_up(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """It ends well, and says what did not run; with time left, the same tests decide."""
    pytester.makepyfile(**TESTS)
    late = run(pytester, monkeypatch, -1, *options)
    assert late.ret == 0, late.outlines
    late.stdout.fnmatch_lines(
        [
            "*= no time left =*",
            "test_ends_well.py: 2 did not run",
            "test_fails.py: 1 did not run",
            "0 tests ran, 3 did not",
        ]
    )
    in_time = run(pytester, monkeypatch, HOURS, *options)
    assert in_time.ret == 1
    in_time.assert_outcomes(passed=2, failed=1)
    assert "did not run" not in in_time.stdout.str()


def test_what_is_under_way_decides(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that began in time and fails after it: the rest is left out, and the run has failed."""
    pytester.makepyfile(
        test_late=f"""
        import os

        def test_is_late_and_fails():
            os.environ[{VARIABLE!r}] = "0"
            raise AssertionError

        def test_is_not_taken():
            pass
        """
    )
    result = run(pytester, monkeypatch, HOURS)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["test_late.py: 1 did not run", "1 tests ran, 1 did not"])


MAKE = """#!/bin/sh
echo "make $*, no new test after ${NO_NEW_TEST_AFTER:-the end of time}"
! echo "$FAILS" | grep -qxF "$*"
"""


def run_ci(folder: Path, *, fails: str = "", so_far_s: int = 0) -> subprocess.CompletedProcess[str]:
    """Run `.ci/run` with a make that only says what it is asked; calls of it may fail."""
    for name, script in (("make", MAKE), ("run", (ROOT / ".ci" / "run").read_text())):
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "FAILS": fails}
    env["SECONDS"] = str(so_far_s)  # From there bash counts on.
    env.pop(VARIABLE, None)
    return subprocess.run([folder / "run"], env=env, capture_output=True, text=True, check=False)


def test_ci_fails_by_all_of_them(tmp_path: Path) -> None:
    """By the linters and the quick tests, and by the slow ones, which get what time is left."""
    before = time.time()
    done = run_ci(tmp_path, so_far_s=600)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "make lint test, no new test after the end of time"
    said, _, end = second.rpartition(" ")
    assert said == "make test-slow, no new test after"
    assert before + 800 < int(end) <= time.time() + 841
    assert run_ci(tmp_path, fails="lint test\nlint test-again").returncode == 1
    assert run_ci(tmp_path, fails="test-slow\ntest-again").returncode == 1


def test_ci_runs_again_what_failed_beside_others(tmp_path: Path) -> None:
    """However late it is: what is not run again would not decide."""
    again = "test-again, no new test after the end of time"
    done = run_ci(tmp_path, fails="test-slow")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2:] == [f"make {again}"]
    done = run_ci(tmp_path, fails="lint test")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == f"make lint {again}"


def test_ci_without_time_for_the_slow_ones(tmp_path: Path) -> None:
    """It passes, and says that they did not run; the quick ones decide all the same."""
    done = run_ci(tmp_path, so_far_s=1500)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (
        0,
        ["no time left: none of the slow tests ran"],
    )
    fails = "lint test\nlint test-again"
    assert run_ci(tmp_path, fails=fails, so_far_s=1500).returncode == 1
