"""Run a program in a fresh interpreter, and say whether it left cleanly.

Errors in destructors and atexit callbacks never change an exit code, so a clean exit is two
things: the exit code that was meant, and nothing on stderr.
"""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.zygotes import IMPORT_PATH, ZYGOTES

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600  # For what hangs; nothing here is about speed, and machines are busy.
UNDER_CLEAN_EXIT = ("-m", "clean_exit", "--max-shutdown", "100", "--")


@dataclass(frozen=True)
class Result:
    """What a program did."""

    command: list[str]
    returncode: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return (
            f"command: {' '.join(self.command)}\nexit code: {self.returncode}\n"
            f"--- stdout\n{self.stdout[-4000:]}\n--- stderr\n{self.stderr[-4000:]}"
        )


def run(
    program: str | Path,
    *arguments: str,
    python: str = sys.executable,
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    stdin: str | None = None,
    as_file: bool = False,
) -> Result:
    """Run Python source, or a file, in a fresh interpreter.

    Source that is run ``as_file`` can be imported again, as spawned processes do.
    """
    if as_file:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "program.py")
            path.write_text(textwrap.dedent(str(program)))
            return run(path, *arguments, python=python, options=options, env=env, stdin=stdin)
    source = [str(program)] if isinstance(program, Path) else ["-c", textwrap.dedent(program)]
    command = [python, *options, *source, *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": IMPORT_PATH, **(env or {})}
    done = subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )
    return Result(command, done.returncode, done.stdout, done.stderr)


def run_forked(
    program: str | Path, *arguments: str, env: dict[str, str] | None = None, quick_end: bool = False
) -> Result:
    """Run Python source, or a file's, as `run` does, where torch has been imported already.

    For programs that would import it themselves; the rest of the interpreter's life is theirs.
    What is in ``env`` is set when torch has been imported. Where the end of the program is not
    what is tested, a ``quick_end`` saves most of what that costs.
    """
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        stdout.touch()
        stderr.touch()
        text = program.read_text() if isinstance(program, Path) else program
        returncode = ZYGOTES.run(
            textwrap.dedent(text),
            *arguments,
            timeout_s=TIMEOUT_S,
            env=env,
            quick_end=quick_end,
            stdout=stdout,
            stderr=stderr,
        )
        texts = [file.read_text(errors="replace") for file in (stdout, stderr)]
    return Result(["(forked)", str(program), *arguments], returncode, *texts)


def assert_clean(result: Result, returncode: int = 0) -> None:
    """Assert that a program left as it should, showing all of its output if not."""
    assert result.returncode == returncode, str(result)
    assert result.stderr == "", str(result)


def output_of(program: str | Path, *arguments: str, returncode: int = 0, **options: Any) -> str:
    """Run a program that must leave cleanly; return its stdout."""
    result = run(program, *arguments, **options)
    assert_clean(result, returncode)
    return result.stdout


def free_port() -> int:
    """Return a port of loopback that nobody listens on at present."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
