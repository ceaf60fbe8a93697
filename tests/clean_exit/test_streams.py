"""Files and streams: the program's are what they would be without clean-exit."""

from __future__ import annotations

import hashlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.clean_exit import CHECKER, ENVIRONMENT, MODULE, QUIET, run_command, shell


def test_inherited_files_pass_through(tmp_path: Path) -> None:
    """``<(...)``, ``3>file``, and the job server of make; and none of the checker's own."""
    out = tmp_path / "out"
    script = f"CHECKER sh -c 'cat $0; echo three >&3' <(echo first) 3>{out}"
    assert shell(script).stdout == "first\n"
    assert out.read_text() == "three\n"
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
    noisy = " ".join(CHECKER)  # With a report that has nowhere to go.
    assert shell(f"{noisy} -- sh -c 'exit 3' {closed}").returncode == 3


def test_a_closed_reader_ends_the_writer() -> None:
    """As plainly: by SIGPIPE."""
    endless = "while :; do echo line >&2 || exit 7; done"
    script = f"CHECKER sh -c {endless!r} 2>&1 >/dev/null | head -1; exit ${{PIPESTATUS[0]}}"
    done = shell(script)
    assert done.stdout == "line\n"
    assert done.returncode == 128 + signal.SIGPIPE


def test_bytes_are_untouched() -> None:
    """Binary output arrives as it was, and stdin is the program's."""
    code = "import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"
    data = os.urandom(100_000)
    copied = subprocess.run([*CHECKER, "-q", "-c", code], input=data, stdout=-1, check=True)
    assert copied.stdout == data
    code = "import sys; sys.stderr.buffer.write(bytes(range(256))); print('out')"
    raw = subprocess.run([*CHECKER, "-q", "-c", code], capture_output=True, check=True)
    assert (raw.stdout, raw.stderr) == (b"out\n", bytes(range(256)))


@pytest.mark.slow
@pytest.mark.parametrize("file", [1, 2])
def test_much_output_in_bounded_memory(file: int) -> None:
    """Half a gigabyte arrives, every byte of it."""
    code = f"import os\nblock = b'x' * (1 << 20)\nfor _ in range(512): os.write({file}, block)\n"
    checker = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29)); "
        f"runpy.run_module({MODULE!r}, run_name='__main__')"
    )
    digest = hashlib.md5(usedforsecurity=False)
    with subprocess.Popen(
        [sys.executable, "-c", checker, "-q", "-c", code],
        stdout=subprocess.PIPE if file == 1 else None,
        stderr=subprocess.PIPE if file == 2 else None,
        env=ENVIRONMENT,
    ) as process:
        stream = process.stdout if file == 1 else process.stderr
        assert stream is not None
        count = 0
        while data := stream.read(1 << 20):
            count += len(data)
            digest.update(data)
    assert process.returncode == 0
    assert count == 512 << 20
    assert digest.digest() == hashlib.md5(b"x" * count, usedforsecurity=False).digest()


def test_output_is_live() -> None:
    """A line of stderr comes when it is written, not when the program ends."""
    code = "import sys, time; print('first', file=sys.stderr, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [*CHECKER, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stdin is not None
        assert process.stderr.readline() == "first\n"
        process.stdin.close()
        assert "clean: the program exited with 0" in process.stderr.read()


def test_a_server_that_does_not_flush() -> None:
    """Python is told not to hold its output back where a line of it is waited for."""
    code = "import time\nprint('listening')\ntime.sleep(60)"
    options = ["--stop-signal", "TERM", "--stop-when", "listening", "--timeout", "50"]
    for flags in ([], ["-I"]):
        done = run_command([*CHECKER, *options, "--", sys.executable, *flags, "-c", code])
        assert (done.returncode, done.stdout) == (0, "listening\n"), done.stderr


def test_stdout_stays_a_terminal_where_it_is_waited_for() -> None:
    """The program has a terminal again, if plainly it had one."""
    pid, terminal = pty.fork()
    if pid == 0:
        options = ["--stop-signal", "TERM", "--stop-when", "ready"]
        program = "[ -t 1 ] && echo is ready; exec sleep 60"
        command = [*CHECKER, "-q", *options, "--", "sh", "-c", program]
        os.execve(sys.executable, command, ENVIRONMENT)
    said = b""
    try:
        while part := os.read(terminal, 1000):
            said += part
    except OSError:
        pass  # So a terminal says that it has been left.
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert b"is ready" in said
    assert os.waitstatus_to_exitcode(status) == 0
