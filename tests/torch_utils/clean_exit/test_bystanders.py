"""What a checker must not harm or change: each with a bystander, compared with the plain program.

`ctl` is a program run plainly; the same is run below clean-exit, and what both leave is compared.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "torch_utils.clean_exit"]
QUIET = [*COMMAND, "-q", "--"]
ROOT = Path(__file__).parents[3]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "env": ENV, **options}
    return subprocess.run(command, text=True, check=False, timeout=100, **options)


def shell(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script of bash, in which CHECKER is the command."""
    return run(["bash", "-c", script.replace("CHECKER", " ".join(QUIET))], **options)


def is_running(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" or int(fields[17]) > 1  # Its first thread may have ended alone.


def wait_for(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come to that")


# Processes


@pytest.mark.parametrize(
    "script",
    [
        "sleep 300 & echo $!; exec CHECKER true",
        "echo $(sleep 300 >/dev/null 2>&1 & echo $!); exec CHECKER true",
        "sleep 300 </dev/null >/dev/null 2>&1 & echo $!; exec CHECKER sh -c 'exit 0'",
    ],
)
def test_what_a_shell_had_started_lives(script: str) -> None:
    """After exec the children of the shell are those of clean-exit, but none of the program's."""
    with subprocess.Popen(
        ["bash", "-c", script.replace("CHECKER", " ".join(QUIET))],
        stdout=subprocess.PIPE,
        env=ENV,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert process.wait(timeout=300) == 0
        assert is_running(pid)
        os.kill(pid, signal.SIGKILL)


def test_what_the_program_started_does_not() -> None:
    """The control: the same process, started below the program."""
    done = shell("exec CHECKER bash -c 'sleep 300 >/dev/null 2>&1 & echo $!'")
    assert done.returncode == 120
    assert not is_running(int(done.stdout))


def test_a_filter_of_stderr_gets_all(tmp_path: Path) -> None:
    """``2> >(tee)`` is a child of the shell that clean-exit replaces."""
    log = tmp_path / "log"
    done = shell(f"exec CHECKER sh -c 'echo to stderr >&2' 2> >(tee {log} >&2)")
    assert done.returncode == 0
    wait_for(lambda: log.exists() and log.read_text() == "to stderr\n")


DAEMONS = {
    "no environment": "(env -i setsid sleep 300 >/dev/null 2>&1 & echo $!)",
    "double fork": f"""exec {sys.executable} -I -c '
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        null = os.open(os.devnull, os.O_RDWR)
        for file in range(3): os.dup2(null, file)
        os.execve("/bin/sleep", ["sleep", "300"], {{}})
    os._exit(0)
os.wait()
'""",
    "only its first thread has ended": f"""exec {sys.executable} -I -c '
import ctypes, os, threading, time
reader, writer = os.pipe()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for file in range(3): os.dup2(null, file)
    threading.Thread(target=time.sleep, args=(300,)).start()
    os.write(writer, b"x")
    ctypes.CDLL(None).pthread_exit(None)
os.read(reader, 1)
time.sleep(0.3)
os._exit(0)
'""",
    "starts another when told to stop": f"""exec {sys.executable} -I -c '
import os, signal, time
reader, writer = os.pipe()
def again(*_):
    if os.fork():
        os._exit(0)
    print(os.getpid(), flush=True)
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, again)
    print(os.getpid(), flush=True)
    os.write(writer, b"x")
    while True: time.sleep(0.01)
os.read(reader, 1)
'""",
}


@pytest.mark.parametrize(
    "how",
    [how if how == "double fork" else pytest.param(how, marks=pytest.mark.slow) for how in DAEMONS],
)
@pytest.mark.parametrize("by", ["command", pytest.param("check", marks=pytest.mark.slow)])
def test_daemons_are_found(how: str, by: str, tmp_path: Path) -> None:
    """By what they descend from, whatever they did to hide; also by `check`, also the last."""
    from torch_utils.clean_exit import check

    command = ["sh", "-c", DAEMONS[how]]
    if by == "command":
        done = run([*COMMAND, "--", *command])
        assert done.returncode == 120, done.stderr
        output, said = done.stdout, done.stderr
    else:
        report = check(command)
        output, said = report.stdout, str(report)
    assert "left-over-process" in said
    assert not any(is_running(int(pid)) for pid in output.split())
    with (tmp_path / "plain").open("w+") as plain:  # The control: nobody else ends them.
        subprocess.run(command, stdout=plain, stdin=subprocess.DEVNULL, check=True)
        plain.seek(0)
        pid = int(plain.read())
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)


def test_zombies_are_reaped_while_it_runs() -> None:
    """Orphans that have ended do not stay in the table of processes."""
    script = """
for i in 1 2 3 4 5; do (sh -c 'exit 0' & echo >/dev/null) & done; sleep 1
ps -o stat= --ppid $PPID | grep -c Z
"""
    assert run([*QUIET, "sh", "-c", script]).stdout == "0\n"


def test_no_checker_no_program() -> None:
    """When the checker is killed, the program does not stay behind alone."""
    with subprocess.Popen(
        [*QUIET, "sh", "-c", "echo $$; exec sleep 300"], stdout=subprocess.PIPE, env=ENV, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        wait_for(lambda: not is_running(pid))


# Files


def test_inherited_files_pass_through(tmp_path: Path) -> None:
    """``<(...)``, ``3>file``, and the job server of make; and none of the checker's own."""
    out = tmp_path / "out"
    script = f"CHECKER sh -c 'cat $0; echo three >&3' <(echo first) 3>{out}"
    assert shell(script).stdout == "first\n"
    assert out.read_text() == "three\n"
    look = "ls /proc/self/fd | sort -n | tr '\\n' ' '"
    assert (
        shell(f"CHECKER sh -c {look!r} 7</dev/null").stdout
        == run(["bash", "-c", f"sh -c {look!r} 7</dev/null"]).stdout
    )


def test_make_jobs(tmp_path: Path) -> None:
    """A recursive make finds its job server."""
    (tmp_path / "Makefile").write_text(
        f"all:\n\t+{' '.join(QUIET)} $(MAKE) --no-print-directory below\n"
        "below: one two\none two:\n\t@echo $@\n"
    )
    done = run(["make", "-j3", "-s"], cwd=tmp_path)
    assert "jobserver" not in done.stderr
    assert sorted(done.stdout.split()) == ["one", "two"]


@pytest.mark.parametrize(
    "closed",
    ["<&- >&- 2>&-", *(pytest.param(c, marks=pytest.mark.slow) for c in ("<&-", ">&-", "2>&-"))],
)
def test_closed_files(closed: str) -> None:
    """The program's exit code, and stdin and stdout as closed as plainly."""
    look = "for n in 0 1; do [ -e /proc/self/fd/$n ] || exit 1$n; done; exit 3"
    script = f"sh -c {look!r} {closed}; echo $? >&9"
    plain = shell(f"exec 9>&1; {script}").stdout
    below = shell(f"exec 9>&1; CHECKER {script}").stdout
    assert below == plain
    assert shell(f"CHECKER sh -c 'exit 3' {closed}").returncode == 3
    noisy = " ".join(COMMAND)  # With a report that has nowhere to go.
    assert shell(f"{noisy} -- sh -c 'exit 3' {closed}").returncode == 3


def test_a_closed_reader_ends_the_writer() -> None:
    """As plainly: who writes to nobody gets SIGPIPE."""
    endless = "while :; do echo line >&2 || exit 7; done"
    script = f"CHECKER sh -c {endless!r} 2>&1 >/dev/null | head -1; exit ${{PIPESTATUS[0]}}"
    done = shell(script)
    assert done.stdout == "line\n"
    assert done.returncode == 128 + signal.SIGPIPE


# Signals

COUNTER = """
import signal, sys, time
got = []
def note(number, frame): got.append(signal.Signals(number).name)
names = "INT TERM HUP QUIT USR1 USR2 WINCH CONT ALRM".split()
for name in names: signal.signal(getattr(signal, "SIG" + name), note)
print("ready", flush=True)
while not sys.stdin.readline(): pass
print(*got, flush=True)
"""


def start(program: str, **options: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*QUIET, sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENV,
        text=True,
        **options,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


NAMES = "INT TERM HUP QUIT USR1 USR2 WINCH CONT ALRM".split()
TO_ONE = [(name, "process") for name in NAMES]
TO_ALL = [(name, "group") for name in NAMES]


@pytest.mark.parametrize(
    ("name", "to"),
    [
        *(TO_ONE + TO_ALL[:2]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in TO_ALL[2:]),
    ],
)
def test_a_signal_arrives_once(name: str, to: str) -> None:
    """Sent to the command alone, or to its whole process group, of which the program is one."""
    number = getattr(signal, f"SIG{name}")
    process = start(COUNTER, start_new_session=True)
    send = os.kill if to == "process" else os.killpg
    send(process.pid, number)
    time.sleep(0.5)  # A second one would come within this.
    said, _ = process.communicate("\n")
    assert said == f"SIG{name}\n"
    assert process.returncode == 0


def test_ctrl_c_of_a_terminal_arrives_once() -> None:
    """Also where stdin is not the terminal; and one from kill is not taken for the terminal's."""
    for by_terminal in (True, False):
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.update(ENV)
            program = COUNTER.replace("not sys.stdin.readline()", "len(got) < 1")
            program = program.replace("pass", "time.sleep(0.01)").replace(
                "print(*got", "time.sleep(0.5); print(*got"
            )
            null = os.open(os.devnull, os.O_RDONLY)
            if by_terminal:
                os.dup2(null, 0)
            os.execv(sys.executable, [*QUIET, sys.executable, "-c", program])
        said = b""
        while b"ready" not in said:
            said += os.read(terminal, 1000)
        if by_terminal:
            os.write(terminal, b"\x03")
        else:
            os.kill(pid, signal.SIGINT)
        try:
            while part := os.read(terminal, 1000):
                said += part
        except OSError:
            pass  # So a terminal says that it has been left.
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
        assert said.count(b"SIGINT") == 1, said
        assert os.waitstatus_to_exitcode(status) == 0


def test_stop_and_go_on() -> None:
    """Stopped as by Ctrl-Z, both are; and both go on when the program alone is told to."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(ENV)
        os.execv(sys.executable, [*QUIET, "sh", "-c", "echo pid=$$.; read line; echo got=$line."])
    said = b""
    while not said.count(b"."):
        said += os.read(terminal, 1000)
    program = int(said.partition(b"=")[2].partition(b".")[0])
    # A group of its own that belongs to no shell is not stopped by the terminal: by hand, then.
    os.kill(program, signal.SIGSTOP)
    wait_for(lambda: state(program) == "T")
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: state(program) != "T")
    os.write(terminal, b"hello\n")
    while b"got=hello." not in said:
        said += os.read(terminal, 1000)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_shell_sees_its_job_stopped() -> None:
    """SIGTSTP to the group: bash tells of a stopped job, and ``fg`` goes on with it."""
    script = """set -m
CHECKER sh -c 'echo ready; kill -TSTP 0; echo on' &
wait $! ; [ $? -gt 128 ] && echo stopped
jobs -s | grep -c Stopped
fg >/dev/null; echo last=$?
"""
    done = shell(script, start_new_session=True)
    assert done.stdout.splitlines() == ["ready", "stopped", "1", "on", "last=0"], done


LOOK = (
    "import signal; print([n for n in signal.valid_signals() if signal.getsignal(n) == "
    "signal.SIG_IGN], signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
)


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", marks=pytest.mark.slow),
        pytest.param("signal.signal(signal.SIGCHLD, signal.SIG_IGN)", marks=pytest.mark.slow),
        pytest.param(
            "[signal.signal(number, signal.SIG_IGN) for number in (1, 2)]", marks=pytest.mark.slow
        ),
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})",
    ],
)
def test_dispositions_and_mask(before: str) -> None:
    """What is ignored and blocked is what it was; exit codes come through."""
    for program, code in (
        (LOOK, 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), 11)", -11),
    ):
        seen = []
        for prefix in ([], QUIET):
            command = [*prefix, sys.executable, "-c", program]
            outer = f"import os, signal; {before}\nos.execv({command[0]!r}, {command!r})"
            seen.append(run([sys.executable, "-c", outer]))
        plain, below = seen
        assert below.stdout == plain.stdout
        assert plain.returncode == code
        assert below.returncode == (code if code >= 0 else 128 - code)
