"""Findings for programs: JSON, and SARIF 2.1.0."""

from __future__ import annotations

import json
import os
from pathlib import PurePath
from urllib.parse import quote_from_bytes

from clean_exit.lint.findings import RULES, SCHEMA_VERSION, UNUSED, Finding, Note
from clean_exit.lint.lint import Result

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_json(result: Result) -> str:
    """Write findings as JSON: ``schema_version`` and ``findings``."""
    found = [finding.to_json() for finding in result.findings]
    return json.dumps({"schema_version": SCHEMA_VERSION, "findings": found}, indent=2)


def to_sarif(result: Result) -> str:
    """Write findings as SARIF, which code hosts and editors read.

    The way from a destructor to a finding is a code flow. What could not be read is told as a
    notification: it makes no result.
    """
    rules = [*RULES.values(), UNUSED]
    run: dict[str, object] = {
        "tool": {
            "driver": {
                "name": "clean-exit-lint",
                "rules": [
                    {
                        "id": rule.id,
                        "name": rule.code,
                        "shortDescription": {"text": rule.summary},
                        "help": {"text": f"clean-exit-lint --explain {rule.id}"},
                        "defaultConfiguration": {"level": "warning"},
                    }
                    for rule in rules
                ],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [_notification(note) for note in result.notes],
            }
        ],
        "results": [_result(one, [rule.id for rule in rules]) for one in result.findings],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _result(finding: Finding, rules: list[str]) -> dict[str, object]:
    region: dict[str, object] = {"startLine": finding.line, "startColumn": finding.column}
    if finding.end_column > finding.column:
        region["endColumn"] = finding.end_column
    if finding.code_line:
        region["snippet"] = {"text": finding.code_line}
    result: dict[str, object] = {
        "ruleId": finding.rule,
        "ruleIndex": rules.index(finding.rule),
        "level": "warning",
        "message": {"text": finding.message},
        "locations": [
            {"physicalLocation": {"artifactLocation": {"uri": uri(finding.path)}, "region": region}}
        ],
    }
    if finding.trace:
        steps = [(step.path, step.line, step.name) for step in finding.trace]
        steps.append((finding.path, finding.line, finding.message))
        flow = [{"location": _location(*step)} for step in steps]
        result["codeFlows"] = [{"threadFlows": [{"locations": flow}]}]
    return result


def _location(path: str, line: int, text: str) -> dict[str, object]:
    place = {"artifactLocation": {"uri": uri(path)}, "region": {"startLine": line}}
    return {"physicalLocation": place, "message": {"text": text}}


def _notification(note: Note) -> dict[str, object]:
    return {
        "level": "note",
        "message": {"text": note.message},
        "locations": [_location(note.path, max(note.line, 1), note.message)],
    }


def uri(path: str) -> str:
    """Return a path as a URI: relative ones stay so."""
    pure = PurePath(path)
    return pure.as_uri() if pure.is_absolute() else quote_from_bytes(os.fsencode(pure.as_posix()))
