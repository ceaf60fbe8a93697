"""The commands `clean-exit` and `clean-exit-lint`, and ways to run them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from clean_exit import ExitReport, check
from clean_exit.cli import main
from clean_exit.lint.cli import main as lint_main
from clean_exit.stderr import StderrText
from tests.support.programs import TIMEOUT_S
from tests.support.zygotes import IMPORT_PATH

__all__ = [
    "CHECKER",
    "ENVIRONMENT",
    "QUIET",
    "ExitReport",
    "StderrText",
    "check",
    "lint_main",
    "main",
    "run_command",
    "shell",
]

CHECKER = (sys.executable, "-m", "clean_exit")
QUIET = (*CHECKER, "-q", "--")
ENVIRONMENT = {**os.environ, "PYTHONPATH": IMPORT_PATH}


def run_command(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, wherever the current folder is."""
    options = {"capture_output": True, "env": ENVIRONMENT, **options}
    return subprocess.run(command, text=True, check=False, timeout=TIMEOUT_S, **options)


def shell(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script of bash, in which CHECKER stands for ``clean-exit -q --``."""
    return run_command(["bash", "-c", script.replace("CHECKER", " ".join(QUIET))], **options)
