"""Find destructors and finalizers that cannot work, without running the code.

    from clean_exit.lint import check, python_files

    for finding in check(python_files(["src"])).findings:
        print(finding.path, finding.line, finding.message)

The command is ``clean-exit-lint`` or ``python -m clean_exit.lint``.
"""

from __future__ import annotations

from clean_exit.lint.files import python_files
from clean_exit.lint.findings import RULES, Finding, Note
from clean_exit.lint.linter import Result, check

__all__ = ["RULES", "Finding", "Note", "Result", "check", "python_files"]
