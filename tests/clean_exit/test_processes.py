"""Processes, files and streams: the program has its own, and no others."""

import os
import shlex
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
    done = shell("sleep 300 >/dev/null 2>&1 & echo $!; exec CHECKER true")
    assert done.returncode == 0
    assert is_there(int(done.stdout))
    os.kill(int(done.stdout), signal.SIGKILL)


def test_remaining_process_is_ended_unless_it_is_ignored() -> None:
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


@pytest.mark.parametrize("wrapper", ["make -sf", "timeout 60 sh"])
def test_program_below_a_wrapper_is_checked(wrapper: str, tmp_path: Path) -> None:
    for code, found in (("1", []), ("import atexit; atexit.register(abs)", ["atexit-error"])):
        program = shlex.join([sys.executable, "-c", code])
        (tmp_path / "script").write_text(f"all:\n\t{program}\n" if "make" in wrapper else program)
        report = check([*wrapper.split(), "script"], cwd=tmp_path)
        assert [one.id for one in report.findings] == found, str(report)
        assert report.probed


def test_inherited_files_reach_the_program(tmp_path: Path) -> None:
    """``<(...)``, ``2> >(...)`` and ``3>file``, but no file of the checker."""
    script = "exec CHECKER sh -c 'cat $0; echo two >&2; echo three >&3' <(echo first) 3>three"
    assert shell(f"{script} 2> >(cat >two)", cwd=tmp_path).stdout == "first\n"
    assert (tmp_path / "three").read_text() == "three\n"
    wait_for(lambda: (tmp_path / "two").read_text() == "two\n")
    look = "ls /proc/self/fd | sort -n | tr '\\n' ' '"
    plain = run_command(["bash", "-c", f"sh -c {look!r} 7</dev/null"])
    assert shell(f"CHECKER sh -c {look!r} 7</dev/null").stdout == plain.stdout


def test_make_finds_its_job_server(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(
        f"all:\n\t+{' '.join(QUIET)} $(MAKE) --no-print-directory below\n"
        "below: one two\none two:\n\t@echo $@\n"
    )
    done = run_command(["make", "-j3", "-s"], cwd=tmp_path)
    assert "jobserver" not in done.stderr
    assert sorted(done.stdout.split()) == ["one", "two"]


def test_closed_standard_files_become_dev_null() -> None:
    closed = "<&- >&- 2>&-"
    look = "for n in 0 1; do file=$(readlink /proc/$$/fd/$n); echo $file >&9; done; exit 3"
    done = shell(f"exec 9>&1; CHECKER sh -c {look!r} {closed} 9>&9", stdin=subprocess.PIPE)
    assert done.returncode == 3
    assert done.stdout.splitlines() == ["/dev/null"] * 2
    noisy = " ".join(CHECKER)  # The report cannot be written.
    assert shell(f"{noisy} -- sh -c 'exit 3' {closed}").returncode == 3


def test_closed_pipe_sends_sigpipe_to_the_program() -> None:
    endless = "while :; do echo line >&2 || exit 7; done"
    script = f"CHECKER sh -c {endless!r} 2>&1 >/dev/null | head -1; exit ${{PIPESTATUS[0]}}"
    done = shell(script)
    assert (done.stdout, done.returncode) == ("line\n", 128 + signal.SIGPIPE)


def test_bytes_of_all_streams_are_unchanged() -> None:
    code = "import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer); "
    code += "sys.stderr.buffer.write(bytes(range(256)))"
    data = os.urandom(100_000)
    done = subprocess.run([*CHECKER, "-q", "-c", code], input=data, capture_output=True)
    assert (done.stdout, done.stderr) == (data, bytes(range(256)))


def test_stderr_passes_through_at_once() -> None:
    code = "import sys, time; print('first', file=sys.stderr, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [*CHECKER, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stdin is not None
        assert process.stderr.readline() == "first\n"
        process.stdin.close()
        assert "clean exit; the program's exit code is 0 (took " in process.stderr.read()


def test_stop_when_matches_a_line_that_comes_in_parts() -> None:
    code = "import time; [(print(c, end='', flush=True), time.sleep(0.1)) for c in ('on', 'e\\n')]"
    options = ["--stop-signal", "TERM", "--stop-when", "^one"]
    done = run_command([*QUIET[:-1], *options, "-c", f"{code}; time.sleep(600)"])
    assert (done.returncode, done.stdout) == (0, "one\n"), done.stderr


@pytest.mark.slow
def test_timeout_holds_while_a_reader_pauses() -> None:
    """No byte of the output is lost."""
    code = "import os\nprint(os.getpid(), flush=True)\nwhile True: os.write(2, b'x' * 1000)"
    with subprocess.Popen(
        [*CHECKER, "--timeout", "6", "-c", code], stdout=-1, stderr=-1, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        wait_for(lambda: not is_there(pid))
        _, message = process.communicate()
    output, _, report = message.partition(b"clean-exit: ")
    assert process.returncode == 124
    assert len(output) > 1_000_000  # Including the bytes in the pipe.
    assert output.strip(b"x") == b""
    assert report.startswith(b"1 finding; the program was killed (took ")
