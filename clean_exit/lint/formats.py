"""The formats: text, GitHub annotations, JSON, and SARIF 2.1.0."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import PurePath
from typing import Any
from urllib.parse import quote_from_bytes

from clean_exit.lint.findings import RULES, SCHEMA_VERSION, Finding
from clean_exit.lint.linter import Result
from clean_exit.options import github_annotation

_WIDEST = 160
_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def to_text(result: Result, *, sums_up: bool = True) -> str:
    """Format findings for people, with a summary in the last line if `sums_up`."""
    lines = []
    for one in result.findings:
        lines.append(f"{one.path}:{one.line}:{one.column}: {one.rule}: {one.message}")
        if code := one.code_line.strip()[:_WIDEST]:
            lines.append(f"  | {code}")
        lines += [f"  see {one.help}", ""]
    return "\n".join([*lines, summary(result)] if sums_up else lines[:-1])


def summary(result: Result) -> str:
    """Return the numbers of findings in one line."""
    files = counted(result.files, "file")
    if not result.findings:
        return f"clean-exit-lint: nothing found in {files}"
    kinds = Counter(finding.rule for finding in result.findings)
    named = ", ".join(f"{count} {rule}" for rule, count in sorted(kinds.items()))
    return f"clean-exit-lint: {counted(len(result.findings), 'finding')} in {files}: {named}"


def counted(count: int, word: str) -> str:
    """Return a number with its noun, in the singular or plural."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def to_github(result: Result) -> str:
    """Format findings as annotations, which GitHub Actions shows beside the code."""
    return "\n".join(
        github_annotation(
            f"{one.message} (see {one.help})",
            file=one.path,
            line=one.line,
            col=one.column,
            title=f"clean-exit-lint: {one.rule}",
        )
        for one in result.findings
    )


def to_json(result: Result) -> str:
    """Format findings as JSON: ``schema_version`` and ``findings``."""
    found = [finding.to_json() for finding in result.findings]
    return json.dumps({"schema_version": SCHEMA_VERSION, "findings": found}, indent=2)


def to_sarif(result: Result) -> str:
    """Format findings as SARIF, which code hosts and editors read."""
    rules = [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.summary},
            "help": {"text": f"clean-exit-lint --explain {rule.id}"},
        }
        for rule in RULES.values()
    ]
    run = {
        "tool": {"driver": {"name": "clean-exit-lint", "rules": rules}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(one) for one in result.findings],
    }
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=2)


def _result(finding: Finding) -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": finding.line, "startColumn": finding.column}
    path = PurePath(finding.path)  # A relative path stays relative.
    is_whole = path.is_absolute()
    uri = path.as_uri() if is_whole else quote_from_bytes(os.fsencode(path.as_posix()))
    place = {"artifactLocation": {"uri": uri}, "region": region}
    return {
        "ruleId": finding.rule,
        "level": "warning",
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": place}],
    }


WRITERS: dict[str, Callable[[Result], str]] = {
    "text": to_text,
    "json": to_json,
    "sarif": to_sarif,
    "github": to_github,
}
