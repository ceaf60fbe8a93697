"""Signals: each arrives once, and terminals and shells behave as without the checker."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.clean_exit import CHECKER, ENVIRONMENT, QUIET, run_command, shell
from tests.support.waiting import is_there, wait_for

NAMES = "INT TERM HUP USR1".split()
# Prints each signal that it receives and ends after SIGPROF.
COUNTER = f"""
import os, signal, time
got = []
def note(number, frame):
    got.append(signal.Signals(number).name)
    os.write(1, (got[-1] + chr(10)).encode())  # print() inside print() mixes lines.
for name in {[*NAMES, "WINCH", "PROF"]!r}:
    signal.signal(getattr(signal, "SIG" + name), note)
print("ready", flush=True)
while "SIGPROF" not in got: time.sleep(0.01)
"""


def start(code: str = COUNTER, **options: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*QUIET, sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
        **options,
    )
    assert next_line(process) == "ready"
    return process


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def rest(process: subprocess.Popen[str]) -> list[str]:
    """Send SIGPROF and return the names of the signals that arrived before it."""
    process.send_signal(signal.SIGPROF)
    message, _ = process.communicate()
    assert process.returncode == 0
    *before, last = message.split()
    assert last == "SIGPROF"
    return before


def read_all(terminal: int, message: bytes = b"") -> bytes:
    """Return all bytes until the other side of a terminal is closed."""
    try:
        while part := os.read(terminal, 1000):
            message += part
    except OSError:
        pass  # The other side of the terminal is closed.
    os.close(terminal)
    return message


def read_until(terminal: int, what: bytes) -> bytes:
    message = b""
    while what not in message:
        message += os.read(terminal, 1000)
    return message


# A program may be in the process group of the command, as usual, or in one of its own, as with
# timeout(1), setsid(1) and job control.
GROUPS = {"its-group": "", "own-group": "setpgid(0, 0)", "own-session": "setsid()"}


def in_group(group: str) -> str:
    return f"import os\nos.{GROUPS[group]}\n{COUNTER}" if GROUPS[group] else COUNTER


@pytest.mark.parametrize("group", GROUPS)
def test_signals_to_the_command_arrive_once(group: str) -> None:
    process = start(in_group(group), start_new_session=True)
    for name in NAMES:
        process.send_signal(getattr(signal, f"SIG{name}"))
        assert next_line(process) == f"SIG{name}"
    assert rest(process) == []


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("name", "twice"), [("USR1", False), ("TERM", True), ("INT", False)])
def test_signal_to_the_process_group_arrives_once(group: str, name: str, twice: bool) -> None:
    """Also if the command gets it by itself before, as from timeout(1).

    The command is stopped meanwhile, because it may run late on a busy machine.
    """
    process = start(in_group(group), start_new_session=True)
    if GROUPS[group]:  # Only the command can pass it on.
        if twice:
            process.send_signal(getattr(signal, f"SIG{name}"))
        os.killpg(process.pid, getattr(signal, f"SIG{name}"))
        assert next_line(process) == f"SIG{name}"
        assert rest(process) == []
        return
    process.send_signal(signal.SIGSTOP)
    if twice:
        process.send_signal(getattr(signal, f"SIG{name}"))
    os.killpg(process.pid, getattr(signal, f"SIG{name}"))
    assert next_line(process) == f"SIG{name}"
    process.send_signal(signal.SIGCONT)
    assert rest(process) == []


def test_closed_terminal_ends_the_program() -> None:
    code = """
import os, time
try: print(f"pid={os.getpid()}.", flush=True)
except OSError: pass  # The terminal may be closed before this call returns.
time.sleep(600)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The tests may run under nohup.
        os.execve(sys.executable, [*QUIET, sys.executable, "-c", code], ENVIRONMENT)
    program = int(read_until(terminal, b".").partition(b"=")[2].partition(b".")[0])
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert not is_there(program)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_report_is_printed_after_a_signal_ends_the_program(number: signal.Signals) -> None:
    code = "import time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [*CHECKER, sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, message = process.communicate(timeout=600)
    assert process.returncode == 128 + number
    assert "clean-exit: " in message
    assert "crash" not in message


def test_change_of_the_window_arrives_once() -> None:
    process = start(start_new_session=True)
    os.killpg(process.pid, signal.SIGWINCH)
    assert next_line(process) == "SIGWINCH"
    assert rest(process) == []


@pytest.mark.parametrize(
    ("by_terminal", "group"),
    [(True, "its-group"), (False, "its-group"), (True, "own-group"), (True, "own-session")],
)
def test_ctrl_c_arrives_once(by_terminal: bool, group: str) -> None:
    """Also if stdin is not the terminal, and if kill sends SIGINT."""
    pid, terminal = pty.fork()
    if pid == 0:
        if by_terminal:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        command = [*QUIET, sys.executable, "-c", in_group(group)]
        os.execve(sys.executable, command, ENVIRONMENT)
    read_until(terminal, b"ready")
    if by_terminal:
        os.write(terminal, b"\x03")
    else:
        os.kill(pid, signal.SIGINT)
    message = read_until(terminal, b"SIGINT")
    os.kill(pid, signal.SIGPROF)
    message = read_all(terminal, message)
    _, status = os.waitpid(pid, 0)
    assert message.count(b"SIGINT") == 1, message
    assert os.waitstatus_to_exitcode(status) == 0


def test_shell_sees_the_job_stopped_and_continues_it() -> None:
    script = """set -m
CHECKER sh -c 'echo ready; kill -TSTP 0; echo on' &
wait $! ; echo $(($? - 128))
jobs -s | grep -c Stopped
fg >/dev/null; echo last=$?
"""
    done = shell(script, start_new_session=True)
    expected = ["ready", str(int(signal.SIGTSTP)), "1", "on", "last=0"]
    assert done.stdout.splitlines() == expected, done


LOOK = (
    "import signal; print([n for n in signal.valid_signals() if signal.getsignal(n) == "
    "signal.SIG_IGN], signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "before",
    [
        "[signal.signal(number, signal.SIG_IGN) for number in (1, 2)]",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})",
    ],
)
def test_ignored_and_blocked_signals_are_inherited(before: str) -> None:
    for program, code in (
        (LOOK, 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), 11)", -11),
    ):
        seen = []
        for prefix in (list[str](), QUIET):
            command = [*prefix, sys.executable, "-c", program]
            outer = f"import os, signal; {before}\nos.execv({command[0]!r}, {command!r})"
            seen.append(run_command([sys.executable, "-c", outer]))
        plain, below = seen
        assert below.stdout == plain.stdout
        assert plain.returncode == code
        assert below.returncode == (code if code >= 0 else 128 - code)


@pytest.mark.slow
def test_ignored_sigchld_loses_no_exit_code() -> None:
    command = [*QUIET, sys.executable, "-c", "raise SystemExit(3)"]
    ignoring = "import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    program = f"{ignoring}\nos.execv({command[0]!r}, {command!r})"
    assert run_command([sys.executable, "-c", program]).returncode == 3


def test_signal_after_the_program_ends_left_over_processes_at_once() -> None:
    program = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    program += "; import os; print(os.getpid(), flush=True)"
    command = [*CHECKER, sys.executable, "-c", program]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        ended = Path("/proc", process.stdout.readline().strip())
        wait_for(lambda: not ended.exists())
        process.send_signal(signal.SIGINT)
        _, message = process.communicate()
    assert "orphan-process" in message
    assert "Traceback" not in message
