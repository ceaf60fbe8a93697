"""Processes: the program's are found and ended, and no others."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clean_exit import check
from tests.support.clean_exit import CHECKER, ENVIRONMENT, QUIET, run_command, shell
from tests.support.waiting import is_there, wait_for


def test_children_of_the_calling_shell_survive() -> None:
    """After exec they are children of clean-exit."""
    script = f"sleep 300 & echo $!; exec {' '.join(QUIET)} true"
    with subprocess.Popen(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert process.wait(timeout=300) == 0
        assert is_there(pid)
        os.kill(pid, signal.SIGKILL)


def test_children_of_the_program_are_ended() -> None:
    done = shell("exec CHECKER bash -c 'sleep 300 >/dev/null 2>&1 & echo $!'")
    assert done.returncode == 120
    wait_for(lambda: not is_there(int(done.stdout)))


def test_ignored_process_goes_on() -> None:
    script = "sleep 300 >/dev/null 2>&1 & echo $!"
    for options, code in ((["--ignore", "orphan-process"], 0), ([], 120)):
        done = run_command([*CHECKER, *options, "--", "bash", "-c", script])
        assert done.returncode == code, done.stderr
        pid = int(done.stdout)
        assert is_there(pid) == (code == 0)
        if code == 0:
            os.kill(pid, signal.SIGKILL)


def test_killed_child_that_was_not_waited_for_is_not_left_over() -> None:
    code = "import subprocess\nsubprocess.Popen(['sleep', '300']).kill()"
    report = check([sys.executable, "-W", "ignore", "-c", code])
    assert report.clean, report


def test_filter_of_stderr_gets_all_output(tmp_path: Path) -> None:
    """``2> >(tee)`` is a child of the shell that clean-exit replaces."""
    log = tmp_path / "log"
    done = shell(f"exec CHECKER sh -c 'echo to stderr >&2' 2> >(tee {log} >&2)")
    assert done.returncode == 0
    wait_for(lambda: log.exists() and log.read_text() == "to stderr\n")


def test_orphaned_zombies_are_reaped_during_the_run(tmp_path: Path) -> None:
    script = """
for n in 1 2 3 4 5; do (sh -c 'exit 0' & echo $!); done >pids
for pid in $(cat pids); do
    for n in $(seq 3000); do [ -e /proc/$pid ] || break; sleep 0.02; done
    [ -e /proc/$pid ] && echo $pid is a zombie
done
wc -l <pids
"""
    assert run_command([*QUIET, "sh", "-c", script], cwd=tmp_path).stdout == "5\n"


def test_killed_checker_ends_the_program_and_leaves_no_folder(tmp_path: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    with subprocess.Popen(
        [*QUIET, "-c", code], stdout=subprocess.PIPE, env={**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert [path.name for path in tmp_path.glob("*/events")] == ["events"]
        process.kill()
        wait_for(lambda: not is_there(pid))
        wait_for(lambda: not any(tmp_path.iterdir()))


@pytest.mark.parametrize(
    "what",
    ["sleep 0.3", pytest.param("timeout 5 sh -c 'while :; do :; done'", marks=pytest.mark.slow)],
)
def test_process_that_ends_soon_after_the_program_is_not_left_over(what: str) -> None:
    """It may sleep for two seconds and work for longer."""
    assert check(["sh", "-c", f"{what} >/dev/null 2>&1 &"]).clean


@pytest.mark.parametrize("wrapper", ["make -sf", "timeout 60 sh", "nohup sh", "unshare -rpf sh"])
@pytest.mark.parametrize("clean", [True, False])
def test_program_below_a_wrapper_is_checked(wrapper: str, clean: bool, tmp_path: Path) -> None:
    """As `make test`, and as below PID 1 of a container."""
    words = wrapper.split()
    if shutil.which(words[0]) is None or (
        words[0] == "unshare" and subprocess.run([*words, "/dev/null"], check=False).returncode
    ):
        pytest.skip(f"{words[0]} is missing, or not allowed")
    code = "print(1)" if clean else "import atexit; atexit.register(lambda: 1 / 0)"
    program = shlex.join([sys.executable, "-c", code])
    (tmp_path / "script").write_text(f"all:\n\t{program}\n" if words[0] == "make" else program)
    report = check([*words, "script"], cwd=tmp_path)
    assert [one.id for one in report.findings] == ([] if clean else ["atexit-error"]), str(report)
    assert report.probed
    assert report.exit_code == (0 if clean else 120)
