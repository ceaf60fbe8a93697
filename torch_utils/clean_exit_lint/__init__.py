"""Read programs, run nothing of them, and say which destructors cannot work.

    from torch_utils.clean_exit_lint import check, python_files

    for finding in check(python_files(["src"])).findings:
        print(finding.path, finding.line, finding.message)

The command is ``clean-exit-lint``, or ``python -m torch_utils.clean_exit_lint``.
"""

from __future__ import annotations

from .discover import python_files
from .findings import RULES, Finding, Note, Step
from .lint import Result, check

__all__ = ["RULES", "Finding", "Note", "Result", "Step", "check", "python_files"]
