"""A file of findings that a project has already: only new ones are reported."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from clean_exit.lint.findings import Finding
from clean_exit.lint.source import STDIN

_VERSION = 1
Known = Counter[tuple[str, str, str]]


def _key(finding: Finding, baseline: Path) -> tuple[str, str, str]:
    """Return what stays when lines are added above: not the line's number, but its text.

    The path is as seen from the baseline's folder, so that it is the same from any folder.
    """
    path = finding.path
    if path != STDIN:
        path = os.path.relpath(path, baseline.parent).replace(os.sep, "/")
    return path, finding.rule, finding.code_line.strip()


def write(baseline: Path, findings: Iterable[Finding]) -> int:
    """Write findings to a file, sorted, so that its changes can be read; return their number.

    Raises:
        OSError: It cannot be written.
    """
    counted = Counter(_key(finding, baseline) for finding in findings)
    rows = [{"path": p, "rule": rule, "code": code, "count": count}
            for (p, rule, code), count in sorted(counted.items())]  # fmt: skip
    text = json.dumps({"version": _VERSION, "findings": rows}, indent=1, ensure_ascii=False)
    # Half a character, of a path that is not UTF-8, becomes the escape that JSON has for it.
    baseline.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    return sum(counted.values())


def subtract(findings: Iterable[Finding], baseline: Path) -> tuple[list[Finding], int]:
    """Return the findings that are new, and how many that were expected are gone.

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
    return new, sum(left.values())


def _read(path: Path) -> Known:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the baseline {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"the baseline {path} is not JSON: {error}") from None
    try:
        rows = data["findings"]
        known = Counter({(r["path"], r["rule"], r["code"]): int(r["count"]) for r in rows})
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the baseline {path} was not written by clean-exit-lint") from None
    if data.get("version") != _VERSION:
        raise ValueError(f"the baseline {path} is of version {data.get('version')!r}, not 1")
    return known
