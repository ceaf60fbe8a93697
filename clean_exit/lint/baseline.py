"""A file of findings that a project has already: only new ones are reported."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

from clean_exit.lint.findings import Finding
from clean_exit.lint.source import STDIN

_VERSION = 1
Known = Counter[tuple[str, str, str]]


def _key(finding: Finding, baseline: Path) -> tuple[str, str, str]:
    """Return what stays when lines are added above: not the line's number, but its text."""
    return _path(finding.path, baseline), finding.rule, finding.code_line.strip()


def _path(path: str, baseline: Path) -> str:
    """Return a path as seen from the baseline's folder: it is the same from any folder."""
    if path == STDIN:
        return path
    folder = os.path.realpath(baseline.parent)
    return os.path.relpath(os.path.realpath(path), folder).replace(os.sep, "/")


def to_text(findings: Iterable[Finding], baseline: Path) -> str:
    """Return what a baseline of these findings has, sorted, so that its changes can be read."""
    counted = Counter(_key(finding, baseline) for finding in findings)
    rows = [{"path": p, "rule": rule, "code": code, "count": count}
            for (p, rule, code), count in sorted(counted.items())]  # fmt: skip
    return json.dumps({"version": _VERSION, "findings": rows}, indent=1, ensure_ascii=False)


def subtract(
    findings: Iterable[Finding], baseline: Path, files: Iterable[str], rules: Collection[str]
) -> tuple[list[Finding], int]:
    """Return the findings that are new, and how many are gone from files and rules checked now.

    Raises:
        ValueError: The baseline cannot be read, or is not such a file.
    """
    left, new = _read(baseline), []
    for finding in findings:
        key = _key(finding, baseline)
        if left[key] > 0:
            left[key] -= 1
        else:
            new.append(finding)
    if not any(left.values()):
        return new, 0
    here = {_path(file, baseline) for file in files}
    gone = (count for (path, rule, _), count in left.items() if path in here and rule in rules)
    return new, sum(gone)


def _read(path: Path) -> Known:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the baseline {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the baseline {path} is not JSON: {error}") from None
    try:
        rows = data["findings"]
        known = Counter({(r["path"], r["rule"], r["code"]): int(r["count"]) for r in rows})
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"the baseline {path} was not written by clean-exit-lint") from None
    if data.get("version") != _VERSION:
        raise ValueError(f"the baseline {path} is of version {data.get('version')!r}, not 1")
    return known
