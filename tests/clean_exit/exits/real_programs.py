"""Programs that people run, each with the verdict it deserves: how they end is their own affair."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clean_exit import ExitReport, check

PYTHON = sys.executable
_BIN = sysconfig.get_path("scripts")

TERM: dict[str, Any] = {"stop_signal": signal.SIGTERM}
INT: dict[str, Any] = {"stop_signal": signal.SIGINT}

DIRTY = """
import atexit
class Held:
    def __del__(self): raise ValueError("the driver is gone")
"""


@dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        group: What has to be installed, by the name that people know.
        name: What is special about it.
        command: Its command line; the first word is a command beside the Python, or anywhere.
        files: What it consists of.
        findings: What has to be found.
        possible: What may be found too; nothing else may be.
        exit_code: What clean-exit says.
        options: For `check`.
        modules: What the Python has to have.
        environment: Added to it.
    """

    group: str
    name: str
    command: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    findings: frozenset[str] = frozenset()
    possible: frozenset[str] = frozenset()
    exit_code: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.group}-{self.name}"

    def missing(self) -> str:
        """Name what is not installed, or nothing."""
        absent = [name for name in self.modules if not _is_installed(name)]
        if self.command[0] != PYTHON and find_command(self.command[0]) is None:
            absent.append(f"the command {self.command[0]}")
        return ", ".join(absent)

    def write(self, folder: Path) -> None:
        """Write its files."""
        for name, text in self.files.items():
            (folder / name).write_text(textwrap.dedent(text))


def find_command(name: str) -> str | None:
    """Find a command, beside the Python first."""
    return shutil.which(name, path=os.pathsep.join([str(_BIN), os.environ["PATH"]]))


@functools.cache
def _is_installed(module: str) -> bool:
    code = "import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)"
    return subprocess.run([PYTHON, "-c", code, module], check=False).returncode == 0


def dirty(*ids: str) -> dict[str, Any]:
    """Say what is found in a program that says 0 itself."""
    return {"findings": frozenset(ids), "exit_code": 120}


def run(program: Program, folder: Path, model: Path | None) -> ExitReport:
    """Run a program in a folder; some load the model."""
    program.write(folder)
    environment = {**os.environ, **program.environment, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    if model is not None:
        environment["TINY_MODEL"] = str(model)
    first = program.command[0]
    command = [first if first == PYTHON else find_command(first) or first, *program.command[1:]]
    return check(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        **{"timeout_s": 600.0, "max_shutdown_s": 120.0, **program.options},
    )


def is_right(program: Program, report: ExitReport) -> bool:
    """Say whether the verdict is what the program deserves."""
    found = {finding.id for finding in report.findings}
    is_expected = program.findings <= found <= program.findings | program.possible
    return is_expected and report.exit_code == program.exit_code
