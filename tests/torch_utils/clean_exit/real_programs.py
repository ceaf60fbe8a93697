"""Programs that people run, each with the verdict it deserves: how they start and stop is theirs.

``CORPUS_PYTHON`` names another Python, with the packages of the extra ``corpus``, to run them.
"""

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

PYTHON = os.environ.get("CORPUS_PYTHON", sys.executable)
_BIN = Path(PYTHON).parent if "CORPUS_PYTHON" in os.environ else sysconfig.get_path("scripts")

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
        options: For `torch_utils.clean_exit.check`.
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
