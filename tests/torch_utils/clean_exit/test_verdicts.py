"""Verdicts on programs of odd kinds, and a checker that does not break on them."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clean_exit.test_bystanders import COMMAND, ENV, QUIET, run
from torch_utils.clean_exit import run as runs
from torch_utils.clean_exit.processes import Process, read_process


def test_work_of_threads_is_no_shutdown() -> None:
    """Threads that go on after the main module are work; what comes after them is the end."""
    from torch_utils.clean_exit import check

    work = "import threading, time\nthreading.Thread(target=time.sleep, args=(1.5,)).start()\n"
    report = check(["-c", work], max_shutdown_s=1)
    assert report.clean
    assert report.threads_s is not None
    assert 1.4 < report.threads_s < report.duration_s
    assert f"{report.threads_s:.2f} s of that waiting for threads, " in str(report)
    slow = "import atexit, time\natexit.register(time.sleep, 1.5)\n"
    report = check(["-c", slow], max_shutdown_s=1)  # The control.
    assert report.threads_s is not None
    (finding,) = report.findings
    assert finding.id == "slow-shutdown"


def test_the_first_python_is_not_the_program() -> None:
    """What is done after a Python below make or a shell is work as well."""
    from torch_utils.clean_exit import check

    script = f"{sys.executable} -c pass; sleep 1.5; exit 0"
    report = check(["sh", "-c", script], max_shutdown_s=1)
    assert report.clean, report
    assert report.shutdown_s is None


def test_a_slow_server_without_a_probe() -> None:
    """Its time since the signal is said, and explained."""
    from torch_utils.clean_exit import check

    script = "trap 'sleep 1.5; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    report = check(
        ["sh", "-c", script], stop_signal=15, stop_when="ready", max_shutdown_s=1, timeout_s=60
    )
    (finding,) = report.findings
    assert finding.id == "slow-shutdown"
    assert "ending after SIGTERM" in finding.evidence


def test_returncode_after_a_timeout() -> None:
    """As it ended, not what another way of waiting for it found."""
    from torch_utils.clean_exit import check

    report = check(["sleep", "60"], timeout_s=0.5)
    assert (report.timed_out, report.returncode) == (True, -signal.SIGTERM)


@pytest.mark.slow
def test_executable_without_an_interpreter(tmp_path: Path) -> None:
    """A Python file is Python's; anything else the shell's, as for execvp(3)."""
    (tmp_path / "x.py").write_text("import sys; print(sys.argv)")
    (tmp_path / "script").write_text("echo from $0")
    (tmp_path / "binary").write_bytes(b"\0\1\2")
    (tmp_path / "y.py").write_text(f"#!{sys.executable} -I\nimport sys; print(sys.flags.isolated)")
    for name in ("x.py", "y.py", "script", "binary"):
        (tmp_path / name).chmod(0o755)
    assert run([*COMMAND, "-q", "x.py"], cwd=tmp_path).stdout == "['x.py']\n"
    assert run([*COMMAND, "-q", "y.py"], cwd=tmp_path).stdout == "1\n"
    assert run([*QUIET, "./script"], cwd=tmp_path).stdout == "from ./script\n"
    assert run([*QUIET, "./binary"], cwd=tmp_path).returncode == 126


@pytest.mark.slow
def test_isolated_packages(tmp_path: Path) -> None:
    """``python -I FOLDER`` and an archive run as plainly; so does ``-mMODULE``."""
    import zipfile

    source = "import sys; print(__name__, sys.argv[1:], sys.path[0], __file__)"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(source)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", source)
    for target in ("folder", "app.pyz"):
        command = [sys.executable, "-I", target, "a"]
        plain = run(command, cwd=tmp_path)
        below = run([*QUIET, *command], cwd=tmp_path)
        assert (below.stdout, below.stderr) == (plain.stdout, plain.stderr)
    assert run([*COMMAND, "-q", "-mfolder", "a"], cwd=tmp_path).returncode == 0


def test_no_temporary_folder() -> None:
    """The program runs all the same."""
    code = """
import sys, tempfile
def refuse(*_, **__): raise FileNotFoundError(2, "No usable temporary directory found")
tempfile.TemporaryDirectory = refuse
from torch_utils.clean_exit import check
print(check(["sh", "-c", "exit 3"]).returncode)
"""
    assert run([sys.executable, "-c", code]).stdout == "3\n"


def test_a_server_that_does_not_flush() -> None:
    """Python is told not to hold its output back where a line of it is waited for."""
    code = "import time\nprint('listening')\ntime.sleep(60)"
    options = ["--stop-signal", "TERM", "--stop-when", "listening", "--timeout", "50"]
    for flags in ([], ["-I"]):
        done = run([*COMMAND, *options, "--", sys.executable, *flags, "-c", code])
        assert (done.returncode, done.stdout) == (0, "listening\n"), done.stderr


def test_stdout_stays_a_terminal_where_it_is_waited_for() -> None:
    """The program has a terminal again, if plainly it had one."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(ENV)
        options = ["--stop-signal", "TERM", "--stop-when", "ready"]
        program = "[ -t 1 ] && echo is ready; exec sleep 60"
        os.execv(sys.executable, [*COMMAND, "-q", *options, "--", "sh", "-c", program])
    said = b""
    try:
        while part := os.read(terminal, 1000):
            said += part
    except OSError:
        pass
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert b"is ready" in said
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("execv('/bin/sh', ['sh', '-c', 'exec sleep 30'])", marks=pytest.mark.slow),
        "closerange(3, 1000); time.sleep(30)",
    ],
)
def test_who_cannot_write_stacks_is_not_asked(what: str, tmp_path: Path) -> None:
    """The signal would end a program that has no handler for it."""
    from torch_utils.clean_exit import check
    from torch_utils.clean_exit.stacks import STACKS_SIGNAL

    program = f"import os, time\nfrom os import *\n{what}"
    report = check(["-c", program], timeout_s=3)
    assert report.timed_out
    assert report.returncode == -signal.SIGTERM != -STACKS_SIGNAL
    wild = subprocess.Popen(["sleep", "30"])  # The control: what it does to such a program.
    wild.send_signal(STACKS_SIGNAL)
    assert wild.wait() == -STACKS_SIGNAL


def test_the_checker_survives_what_the_program_puts_in_its_place() -> None:
    """Where the probe writes, the program can write too: a FIFO must not keep the checker."""
    from torch_utils.clean_exit import check

    code = """
import glob, os, sys
(path,) = [p for p in glob.glob(sys.argv[1] + "/clean-exit-*/events")]
os.unlink(path)
os.mkfifo(path)
"""
    # The time allowed ends a checker that waits for the FIFO's writer: the negative control.
    outer = "import sys; from torch_utils.clean_exit import check; print(check(sys.argv[1:]).clean)"
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", outer, sys.executable, "-c", code, folder]
        done = run(command, env={**ENV, "TMPDIR": folder})
    assert done.stdout == "True\n", done.stderr
    assert check(["true"]).clean


@pytest.mark.parametrize(("is_ending", "found"), [(True, []), (False, ["left-over-process"])])
def test_what_the_kernel_is_about_to_end_is_not_left_over(
    is_ending: bool, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has given up its memory may take longer than the patience with others."""
    from torch_utils.clean_exit import check

    process = Process(4_000_000, 1, 1, "R", "", is_ending)
    looks = iter([[process]] * 20)
    monkeypatch.setattr(runs, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(runs, "descendants", lambda ancestor: next(looks, []))
    report = check(["true"])
    assert [finding.id for finding in report.findings] == found


def test_output_ends_after_its_last_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that took longer than the patience with others leaves time to read its end."""
    from torch_utils.clean_exit import check

    helper = Process(4_000_000, 1, 1, "S", "resource_tracker")
    looks = iter([[helper]] * 30)
    monkeypatch.setattr(runs, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(runs, "descendants", lambda ancestor: next(looks, []))
    has_ended = property(lambda keeper: keeper.returncode is not None, lambda keeper, value: None)
    monkeypatch.setattr(runs.Keeper, "is_alone", has_ended, raising=False)
    # Holds stderr open for a moment after it is seen no more.
    report = check(["sh", "-c", "sleep 0.8 & exit 0"])
    assert report.clean, report


def test_a_process_that_is_killed_is_about_to_end() -> None:
    """What tells one: seen from its start to its end, it runs, and then has no memory."""
    with subprocess.Popen(["sleep", "300"]) as sleeper:
        running = read_process(sleeper.pid)
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        ended = read_process(sleeper.pid)
    assert running is not None and not running.is_ending
    assert ended is not None and ended.is_ending
    assert ended.state == "Z"


def test_a_chain_of_short_lived_processes(tmp_path: Path) -> None:
    """Each forks the next and goes, faster than /proc can be read: found and ended all the same."""
    from torch_utils.clean_exit import check

    program = tmp_path / "chain.py"
    program.write_text("""
import os, time
if os.fork() == 0:
    os.setsid()
    for file in range(3):
        os.close(file)
    stop = time.monotonic() + 60
    while time.monotonic() < stop:
        if os.fork():
            os._exit(0)
        time.sleep(0.001)
""")
    report = check(program)
    assert [finding.id for finding in report.findings] == ["left-over-process"], report
    done = subprocess.run(
        ["pgrep", "-f", str(program)], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
