"""Files and streams: the program has the same ones as without clean-exit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.clean_exit import CHECKER, ENVIRONMENT, QUIET, run_command, shell
from tests.support.programs import TIMEOUT_S
from tests.support.waiting import is_there, wait_for


def test_inherited_files_reach_the_program(tmp_path: Path) -> None:
    """``<(...)`` and ``3>file``, but no file of the checker."""
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
    assert done.stdout == "line\n"
    assert done.returncode == 128 + signal.SIGPIPE


def test_bytes_of_all_streams_are_unchanged() -> None:
    code = "import sys, shutil; shutil.copyfileobj(sys.stdin.buffer, sys.stdout.buffer)"
    data = os.urandom(100_000)
    copied = subprocess.run([*CHECKER, "-q", "-c", code], input=data, stdout=-1, check=True)
    assert copied.stdout == data
    code = "import sys; sys.stderr.buffer.write(bytes(range(256))); print('out')"
    raw = subprocess.run([*CHECKER, "-q", "-c", code], capture_output=True, check=True)
    assert (raw.stdout, raw.stderr) == (b"out\n", bytes(range(256)))


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
    """Split inside a character, which has two bytes."""
    code = """
import os, time
for part in "höre zu\\n".encode().partition(b"\\xb6"):
    os.write(1, part)
    time.sleep(0.5)
time.sleep(600)
"""
    options = ["--stop-signal", "TERM", "--stop-when", "^höre zu", "--timeout", "50"]
    done = run_command([*QUIET[:-1], *options, "-c", code])
    assert (done.returncode, done.stdout) == (0, "höre zu\n"), done.stderr


@pytest.mark.slow
def test_timeout_holds_while_a_reader_pauses() -> None:
    """No byte of the output is lost."""
    code = "import os\nprint(os.getpid(), flush=True)\nwhile True: os.write(2, b'x' * 1000)"
    reader, writer = os.pipe()
    started = time.monotonic()
    with subprocess.Popen(
        [*CHECKER, "--timeout", "6", "-c", code],
        stdout=subprocess.PIPE,
        stderr=writer,
        env=ENVIRONMENT,
    ) as process:
        os.close(writer)
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        wait_for(lambda: not is_there(pid))
        assert time.monotonic() - started >= 6
        with open(reader, "rb") as stream:
            message = stream.read()
        assert process.wait(timeout=TIMEOUT_S) == 124
    output, _, report = message.partition(b"clean-exit: ")
    assert len(output) > 1_000_000  # Including the bytes in the pipe.
    assert output.strip(b"x") == b""
    assert report.startswith(b"1 finding; the program was killed (took ")
