"""The formats of a report: text, JSON and GitHub annotations."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence

from clean_exit.findings import ABOUT_A_CHILD, FINDINGS, Finding
from clean_exit.report import SCHEMA_VERSION, ExitReport, summarise

_MAX_LINES = 15  # of evidence without -v
_MAX_FINDINGS = 10  # without -v; GitHub shows as many annotations of one step
_PLACE = re.compile(r'^ *File "(?P<path>[^"]+)", line (?P<line>\d+)', re.MULTILINE)


def to_text(report: ExitReport, *, verbose: bool = False) -> str:
    """Format a report for people: a summary, then the findings with their evidence."""
    lines = [f"clean-exit: {summarise(report)}"]
    if report.note:
        lines.append(f"  note: {report.note}")
    if verbose:
        lines.append(f"  command: {shlex.join(report.command)}")
        sides = "inside and outside" if report.probed else "outside only (no probe was loaded)"
        lines.append(f"  observed from {sides}")
    visible = report.findings if verbose else report.findings[:_MAX_FINDINGS]
    for finding in visible:
        lines += _finding_lines(finding, verbose)
    hidden = Counter(finding.id for finding in report.findings[len(visible) :])
    if hidden:
        kinds = ", ".join(f"{count} {name}" for name, count in hidden.items())
        lines += ["", f"  ... {hidden.total()} more findings: {kinds} (-v shows them)"]
    return "\n".join(lines)


def _finding_lines(finding: Finding, verbose: bool) -> list[str]:
    where = f", {finding.where}" if finding.where else ""
    lines = ["", f"  {finding.id}: {FINDINGS[finding.id]}{where}"]
    lines.append(f"    {finding.summary}")
    evidence = finding.evidence.splitlines()
    if not verbose and len(evidence) > _MAX_LINES:
        hidden = len(evidence) - _MAX_LINES
        evidence = [*evidence[:_MAX_LINES], f"... {hidden} more lines (-v shows them)"]
    lines += [f"    | {line}" for line in evidence]
    if finding.child:
        lines.append(f"    {ABOUT_A_CHILD}")
    lines.append(f"    see {finding.help}")
    return lines


def to_json(reports: Sequence[ExitReport]) -> str:
    """Format reports as JSON; docs/clean-exit.md describes the schema."""
    import json  # Here, because most runs do not need it.

    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "clean": all(report.clean for report in reports),
            "runs": [report.to_json() for report in reports],
        },
        indent=2,
    )


def to_github(report: ExitReport) -> str:
    """Format findings as annotations, which GitHub Actions shows with the run or in the code."""
    lines = []
    for finding in report.findings[:_MAX_FINDINGS]:
        message = f"{finding.summary}\n{finding.evidence}\nsee {finding.help}"
        place = _place(finding.evidence)
        lines.append(github_annotation(message, **place, title=f"clean-exit: {finding.id}"))
    return "\n".join(lines)


def _place(evidence: str) -> dict[str, object]:
    """Return the innermost file and line of a traceback or stack below GitHub's or this folder."""
    places = list(_PLACE.finditer(evidence))
    if "most recent call first" in evidence:  # By faulthandler; else the innermost is the last.
        places.reverse()
    here = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()  # noqa: PTH109  (as os.path below)
    for match in reversed(places):
        path = os.path.relpath(match["path"], here)
        if not path.startswith(os.pardir) and os.path.isfile(match["path"]):  # noqa: PTH113
            return {"file": path, "line": match["line"]}
    return {}


def github_annotation(message: str, **properties: object) -> str:
    """Return the command of GitHub Actions for an error with a title or a place."""
    pairs = (f"{name}={_escape(str(value), ':,')}" for name, value in properties.items())
    return f"::error {','.join(pairs)}::{_escape(message)}"


def _escape(text: str, more: str = "") -> str:
    return "".join(f"%{ord(char):02X}" if char in f"%\r\n{more}" else char for char in text)
