"""Signals that hardly anybody sends, and those that the program itself sends to its parent."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time

import pytest

from clean_exit.test_bystanders import COUNTER, ENV, QUIET, run, shell, start

ALL = "XCPU TRAP SYS SEGV BUS FPE PIPE XFSZ IO PROF".split()


def test_whatever_is_sent_arrives() -> None:
    """Those too that a kernel sends to a program that has gone wrong: sent, they are signals."""
    program = COUNTER.replace("ALRM", " ".join(["ALRM", *ALL]))
    waits = f"while len(got) < {len(ALL)}: __import__('time').sleep(0.01)"
    process = start(program.replace("while not sys.stdin.readline(): pass", waits))
    for name in ALL:
        process.send_signal(getattr(signal, f"SIG{name}"))
    said, _ = process.communicate(timeout=100)
    assert sorted(said.split()) == sorted(f"SIG{name}" for name in ALL)


def test_one_for_the_group_arrives_once_however_late_the_checker_is() -> None:
    """Stopped meanwhile, as a busy machine may keep it from running: the keeper remembers."""
    process = start(COUNTER, start_new_session=True)
    os.kill(process.pid, signal.SIGSTOP)
    os.killpg(process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)  # A second one would come within this.
    said, _ = process.communicate("\n")
    assert said.split().count("SIGUSR1") == 1


@pytest.mark.parametrize("prefix", ["", "CHECKER "])
@pytest.mark.parametrize(
    ("command", "got"), [("kill -USR1 $PPID", "got "), ("kill -USR1 0", "got "), ("true", "")]
)
def test_signals_for_the_parent(prefix: str, command: str, got: str) -> None:
    """They reach who called the command, as plainly, and once."""
    script = f"trap 'printf \"got \"' USR1; {prefix}sh -c 'trap : USR1; {command}; sleep 0.5'; echo"
    assert shell(script, start_new_session=True).stdout == got + "\n"


@pytest.mark.parametrize("prefix", [[], QUIET])
def test_reading_in_the_background(prefix: list[str]) -> None:
    """It is stopped by the terminal it reads from, and goes on in front: it is stopped once."""
    job = "sh -c 'read line; echo got $line.'"
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(ENV)
        script = f'set -m; "$@" {job} & wait $!; echo code $?.; sleep 0.5; fg; echo last $?.'
        os.execvp("bash", ["bash", "-c", script, "bash", *prefix])
    said = b""
    while b"code" not in said:
        said += os.read(terminal, 1000)
    os.write(terminal, b"hello\n")
    try:
        while part := os.read(terminal, 1000):
            said += part
    except OSError:
        pass  # So a terminal says that it has been left.
    os.waitpid(pid, 0)
    os.close(terminal)
    assert f"code {128 + signal.SIGTTIN}.".encode() in said, said
    assert b"got hello." in said, said
    assert b"last 0." in said, said


@pytest.mark.parametrize(
    "handler",
    [
        "signal.signal(62, lambda *_: print('got it', flush=True))",
        pytest.param(
            "import faulthandler; faulthandler.register(62, sys.stdout)", marks=pytest.mark.slow
        ),
        pytest.param(
            "import faulthandler; faulthandler.register(signum=62, file=sys.stdout)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_its_own_handler_of_the_signal_for_stacks(handler: str) -> None:
    """A program that handles that signal itself never gets it from the checker."""
    own = "import atexit, signal, time, sys\n{handler}\natexit.register(time.sleep, 1)\n"
    command = [sys.executable, "-m", "torch_utils.clean_exit", "--max-shutdown", "0.2", "-v", "-c"]
    done = run([*command, own.format(handler=handler)])
    assert done.stdout == ""
    assert "slow-shutdown" in done.stderr
    assert "most recent call first" not in done.stderr
    control = run([*command, own.format(handler="")])
    assert "most recent call first" in control.stderr


def test_errors_of_signal_look_the_same() -> None:
    """What sees the handler set leaves no frame in the traceback of an error."""
    code = "import signal, threading\ndef f(): signal.signal(62, signal.SIG_IGN)\n"
    code += "t = threading.Thread(target=f); t.start(); t.join()\n"
    plain = run([sys.executable, "-c", code])
    below = run([sys.executable, "-m", "torch_utils.clean_exit", "-q", "-c", code])
    assert "main thread" in plain.stderr
    assert below.stderr == plain.stderr
