"""Run an application as its user would, and return what it measured."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.programs import TIMEOUT_S, Result, assert_clean, run
from tests.support.waiting import wait_for
from tests.support.zygotes import IMPORT_PATH

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"


def environment(mutant: str | None = None) -> dict[str, str]:
    """Return the variables for an application, which all of its processes inherit."""
    path = f"{HERE / 'mutant'}:{IMPORT_PATH}" if mutant else IMPORT_PATH
    return {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path, "MUTANT": mutant or ""}


def facts_of(output: str) -> dict[str, Any]:
    """Merge what a program told by `measure.tell`."""
    lines = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    return {name: value for line in lines for name, value in line.items()}


def run_application(
    name: str, *arguments: str, mutant: str | None = None, python: str = sys.executable
) -> dict[str, Any]:
    """Run a program of this folder to its end, which must be clean, and return its facts.

    Args:
        name: Its file in `programs`, without the suffix.
        mutant: A function of `mutant/sitecustomize.py` that breaks the product.
    """
    program = PROGRAMS / f"{name}.py"
    done: Result = run(program, *arguments, python=python, env=environment(mutant))
    assert_clean(done)
    return facts_of(done.stdout)


class Service:
    """A program that runs until it is told to stop.

    Attributes:
        process: The program. It leads a process group of its own.
    """

    def __init__(self, command: list[str], folder: Path, mutant: str | None) -> None:
        self._command = command
        self._files = folder / "stdout", folder / "stderr"
        with self._files[0].open("w") as stdout, self._files[1].open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, **environment(mutant)},
                start_new_session=True,
            )

    def wait_for_output(self, pattern: str) -> re.Match[str]:
        """Wait until the program has written a match of a pattern, and return the match."""
        found: list[re.Match[str]] = []

        def is_written() -> bool:
            ended = self.process.poll() is not None
            for file in self._files:
                found.extend(re.finditer(pattern, file.read_text()))
            assert found or not ended, str(self.wait())
            return bool(found)

        wait_for(is_written)
        return found[0]

    def wait(self) -> Result:
        """Wait for the end of the program, and return what it did."""
        code = self.process.wait(TIMEOUT_S)
        return Result(self._command, code, *(file.read_text() for file in self._files))


@contextlib.contextmanager
def started(*command: str, mutant: str | None = None) -> Iterator[Service]:
    """Start a program; kill it at the end of the block if it still runs."""
    with tempfile.TemporaryDirectory() as folder:
        service = Service(list(command), Path(folder), mutant)
        try:
            yield service
        finally:
            if service.process.poll() is None:
                service.process.kill()
            service.process.wait(TIMEOUT_S)
