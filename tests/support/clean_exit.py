"""Where `clean-exit` and `clean-exit-lint` live, and ways to run them.

This is the only module of the tests that says where they are imported from.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from clean_exit import FINDINGS, ExitReport, check
from clean_exit.cli import main
from clean_exit.lint import RULES, python_files
from clean_exit.lint import Finding as LintFinding
from clean_exit.lint import Result as LintResult
from clean_exit.lint import check as lint
from clean_exit.lint.cli import main as lint_main
from clean_exit.stderr import StderrText
from tests.support.programs import TIMEOUT_S
from tests.support.zygotes import IMPORT_PATH

__all__ = [
    "CHECKER",
    "CLEAN_EXIT",
    "ENTRY_POINTS",
    "ENVIRONMENT",
    "FINDINGS",
    "LINT",
    "LINT_MODULE",
    "MODULE",
    "PYTEST_PLUGIN",
    "QUIET",
    "RULES",
    "ExitReport",
    "LintFinding",
    "LintResult",
    "Linted",
    "StderrText",
    "check",
    "lint",
    "lint_as_command",
    "lint_main",
    "main",
    "python_files",
    "run_command",
    "shell",
]

MODULE, LINT_MODULE = "clean_exit", "clean_exit.lint"
CLEAN_EXIT, LINT = ("-m", MODULE), ("-m", LINT_MODULE)
"""Arguments for a Python that run the two commands."""
PYTEST_PLUGIN = "clean_exit.pytest_plugin"
ENTRY_POINTS = {
    ("console_scripts", "clean-exit"): "clean_exit.cli:main",
    ("console_scripts", "clean-exit-lint"): "clean_exit.lint.cli:main",
    ("pytest11", "clean_exit"): PYTEST_PLUGIN,
    ("flake8.extension", "CEX"): "clean_exit.lint.flake8_plugin:Plugin",
}
"""What a wheel declares: the group and the name of each, and what it loads."""

CHECKER = (sys.executable, *CLEAN_EXIT)
QUIET = (*CHECKER, "-q", "--")
ENVIRONMENT = {**os.environ, "PYTHONPATH": IMPORT_PATH}


def run_command(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, wherever the current folder is."""
    options = {"capture_output": True, "env": ENVIRONMENT, **options}
    return subprocess.run(command, text=True, check=False, timeout=TIMEOUT_S, **options)


def shell(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script of bash, in which CHECKER stands for ``clean-exit -q --``."""
    return run_command(["bash", "-c", script.replace("CHECKER", " ".join(QUIET))], **options)


class Linted(NamedTuple):
    """A finding of `clean-exit-lint` as its JSON says it, and the line of code that it is in."""

    path: str
    line: int
    rule: str
    code: str


def lint_as_command(
    paths: Iterable[str | os.PathLike[str]], **options: Collection[str]
) -> tuple[list[Linted], str]:
    """Run ``clean-exit-lint --format json`` in this process; return findings, and its stderr.

    Options are those of the command that may be repeated: ``select``, ``ignore``, ``exclude``.
    """
    given = [f"--{name}={value}" for name, values in options.items() for value in values]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = lint_main(["--format=json", *given, *map(str, paths)])
    found = json.loads(out.getvalue() or '{"findings": []}')["findings"]
    assert code == bool(found), f"exit code {code}: {err.getvalue()}"
    findings = []
    for one in found:
        linecache.checkcache(one["path"])
        code_line = linecache.getline(one["path"], one["line"]).strip()
        findings.append(Linted(one["path"], one["line"], one["rule"], code_line))
    return findings, err.getvalue()
