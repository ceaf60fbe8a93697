"""The baseline: a file of known findings, so that only new ones are reported."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from clean_exit.lint.findings import Finding

_VERSION = 1
Known = Counter[tuple[str, str, str]]


def _key(finding: Finding, baseline: Path) -> tuple[str, str, str]:
    """Return the path, the rule and the text of the line; its number may change."""
    # Relative to the baseline's folder, so that the current folder is irrelevant.
    folder = os.path.realpath(baseline.parent)
    path = os.path.relpath(os.path.realpath(finding.path), folder).replace(os.sep, "/")
    return path, finding.rule, finding.code_line.strip()


def to_text(findings: Iterable[Finding], baseline: Path) -> str:
    """Return the text of a baseline with these findings, sorted so that diffs are readable."""
    counted = Counter(_key(finding, baseline) for finding in findings)
    rows = [{"path": p, "rule": rule, "code": code, "count": count}
            for (p, rule, code), count in sorted(counted.items())]  # fmt: skip
    return json.dumps({"version": _VERSION, "findings": rows}, indent=1, ensure_ascii=False)


def subtract(findings: Iterable[Finding], baseline: Path) -> list[Finding]:
    """Return the findings that are not in a baseline.

    Raises:
        ValueError: The baseline cannot be read, or is not a baseline.
    """
    known, new = _read(baseline), []
    for finding in findings:
        key = _key(finding, baseline)
        if known[key] > 0:
            known[key] -= 1
        else:
            new.append(finding)
    return new


def _read(path: Path) -> Known:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        is_known = data["version"] == _VERSION
        known = Counter(
            {(r["path"], r["rule"], r["code"]): int(r["count"]) for r in data["findings"]}
        )
    except OSError as error:
        raise ValueError(f"the baseline {path} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        is_known = False
    if not is_known:
        raise ValueError(f"the baseline {path} was not written by this clean-exit-lint")
    return known
