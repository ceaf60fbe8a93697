"""Signals: each arrives once, and terminals and shells behave as without the checker."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clean_exit import CHECKER, ENVIRONMENT, QUIET, run_command, shell
from tests.support.programs import TIMEOUT_S
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


def start(code: str, *command: str) -> subprocess.Popen[str]:
    """Start a program below a command, and wait until it is ready."""
    process = subprocess.Popen(
        [*(command or QUIET), sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        text=True,
        start_new_session=True,
    )
    assert next_line(process) == "ready"
    return process


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def assert_no_other(process: subprocess.Popen[str]) -> None:
    """Send SIGPROF, and assert that no other signal arrived before it."""
    process.send_signal(signal.SIGPROF)
    message, _ = process.communicate()
    assert (message, process.returncode) == ("SIGPROF\n", 0)


def read_until(terminal: int, what: bytes) -> bytes:
    message = b""
    while what not in message:
        message += os.read(terminal, 1000)
    return message


# A program may be in the process group of the command, as usual, or in one of its own, as with
# timeout(1), setsid(1) and job control.
GROUPS = {"its-group": "", "own-group": "os.setpgid(0, 0)", "own-session": "os.setsid()"}
SLOW_GROUP = pytest.param("own-group", marks=pytest.mark.slow)


def in_group(group: str) -> str:
    return f"import os\n{GROUPS[group]}\n{COUNTER}"


@pytest.mark.parametrize("group", ["its-group", SLOW_GROUP, "own-session"])
def test_signals_to_the_command_arrive_once(group: str) -> None:
    process = start(in_group(group))
    for name in NAMES:
        process.send_signal(getattr(signal, f"SIG{name}"))
        assert next_line(process) == f"SIG{name}"
    assert_no_other(process)


@pytest.mark.parametrize(
    ("group", "name", "twice"),
    [
        ("its-group", "TERM", True),
        ("its-group", "WINCH", False),
        ("own-session", "TERM", True),
        pytest.param("own-group", "USR1", False, marks=pytest.mark.slow),
    ],
)
def test_signal_to_the_process_group_arrives_once(group: str, name: str, twice: bool) -> None:
    """Also if the command gets it by itself before, as from timeout(1).

    The command is stopped meanwhile, because it may run late on a busy machine. If the program is
    in another group, only the command can pass the signal on.
    """
    process, number = start(in_group(group)), getattr(signal, f"SIG{name}")
    is_direct = group == "its-group"
    if is_direct:
        process.send_signal(signal.SIGSTOP)
    if twice:
        process.send_signal(number)
    os.killpg(process.pid, number)
    assert next_line(process) == f"SIG{name}"
    if is_direct:
        process.send_signal(signal.SIGCONT)
    assert_no_other(process)


def test_closed_terminal_ends_the_program() -> None:
    # The terminal may be closed before print() returns.
    code = """
import contextlib, os, time
with contextlib.suppress(OSError): print(f"pid={os.getpid()}.", flush=True)
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


def test_report_is_printed_after_a_signal_ends_the_program() -> None:
    process = start("import time; print('ready', flush=True); time.sleep(60)", *CHECKER)
    process.send_signal(signal.SIGTERM)
    _, message = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "clean-exit: " in message
    assert "crash" not in message


@pytest.mark.parametrize(
    ("by_terminal", "group"),
    [
        (True, "its-group"),
        pytest.param(False, "its-group", marks=pytest.mark.slow),
        pytest.param(True, "own-group", marks=pytest.mark.slow),
        (True, "own-session"),
    ],
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
    message += read_until(terminal, b"SIGPROF")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
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


def run_after(before: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose parent has changed its signals."""
    program = f"import os, signal; {before}\nos.execv({command[0]!r}, {command!r})"
    return run_command([sys.executable, "-c", program])


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
        ("import os; os.kill(os.getpid(), 11)", 139),
    ):
        command = [sys.executable, "-c", program]
        below = run_after(before, *QUIET, *command)
        assert below.stdout == run_after(before, *command).stdout
        assert below.returncode == code


@pytest.mark.slow
def test_ignored_sigchld_loses_no_exit_code() -> None:
    command = [*QUIET, sys.executable, "-c", "raise SystemExit(3)"]
    ignoring = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    assert run_after(ignoring, *command).returncode == 3


def test_signal_after_the_program_ends_left_over_processes_at_once() -> None:
    program = "import os, subprocess; print(f'ready\\n{os.getpid()}', flush=True)"
    program += "; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    process = start(program, *CHECKER)
    ended = Path("/proc", next_line(process))
    wait_for(lambda: not ended.exists())
    process.send_signal(signal.SIGINT)
    _, message = process.communicate()
    assert "orphan-process" in message
    assert "Traceback" not in message
