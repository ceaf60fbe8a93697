"""The commands `clean-exit` and `clean-exit-lint`, and ways to run them."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from clean_exit import ExitReport, check
from clean_exit.cli import main
from clean_exit.lint.cli import main as lint_main
from tests.support.programs import TIMEOUT_S
from tests.support.zygotes import IMPORT_PATH

__all__ = [
    "CHECKER",
    "ENVIRONMENT",
    "QUIET",
    "ExitReport",
    "check",
    "exit_code",
    "lint_main",
    "main",
    "run_command",
    "shell",
]

CHECKER = (sys.executable, "-m", "clean_exit")
QUIET = (*CHECKER, "-q", "--")
ENVIRONMENT = {**os.environ, "PYTHONPATH": IMPORT_PATH}


def exit_code(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run `main` or `lint_main` in this process, and return its exit code."""
    try:
        return command(arguments)
    except SystemExit as ended:  # From argparse.
        return int(ended.code or 0)


def run_command(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, wherever the current folder is."""
    options = {"capture_output": True, "env": ENVIRONMENT, **options}
    return subprocess.run(command, text=True, check=False, timeout=TIMEOUT_S, **options)


def shell(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script of bash, in which CHECKER stands for ``clean-exit -q --``."""
    return run_command(["bash", "-c", script.replace("CHECKER", " ".join(QUIET))], **options)
