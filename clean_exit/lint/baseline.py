"""A file of findings that a project has already: only new ones are reported."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from clean_exit.lint.findings import Finding

_VERSION = 1


def _key(finding: Finding) -> tuple[str, str, str]:
    """Return what stays when lines are added above: not the line's number, but its text."""
    return finding.path.replace("\\", "/"), finding.rule, finding.code_line.strip()


def write(path: Path, findings: Iterable[Finding]) -> int:
    """Write findings to a file, sorted, so that its changes can be read; return their number.

    Raises:
        OSError: It cannot be written.
    """
    counted = Counter(map(_key, findings))
    rows = [{"path": p, "rule": rule, "code": code, "count": count}
            for (p, rule, code), count in sorted(counted.items())]  # fmt: skip
    text = json.dumps({"version": _VERSION, "findings": rows}, indent=1, ensure_ascii=False)
    # Half a character, of a path that is not UTF-8, becomes the escape that JSON has for it.
    path.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    return sum(counted.values())


def load(path: Path) -> Counter[tuple[str, str, str]]:
    """Return how often each finding is expected.

    Raises:
        ValueError: It cannot be read, or is not such a file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the baseline {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"the baseline {path} is not JSON: {error}") from None
    if isinstance(data, dict) and data.get("version", _VERSION) != _VERSION:
        raise ValueError(f"the baseline {path} is of version {data['version']!r}, not 1")
    try:
        rows = data["findings"]
        return Counter(
            {(str(r["path"]), str(r["rule"]), str(r["code"])): int(r["count"]) for r in rows}
        )
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"the baseline {path} was not written by clean-exit-lint") from None


def subtract(
    findings: Iterable[Finding], known: Counter[tuple[str, str, str]]
) -> tuple[list[Finding], int]:
    """Return the findings that are new, and how many that were expected are gone."""
    left = Counter(known)
    new = []
    for finding in findings:
        key = _key(finding)
        if left[key] > 0:
            left[key] -= 1
        else:
            new.append(finding)
    return new, sum(left.values())
