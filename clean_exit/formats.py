"""The formats of a report: text, JSON, JUnit XML and GitHub annotations."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Sequence

from clean_exit.findings import FINDINGS, Finding
from clean_exit.report import SCHEMA_VERSION, ExitReport, summarise

_MAX_LINES = 15  # of evidence without -v
_MAX_FINDINGS = 10  # without -v; GitHub shows as many annotations of one step
_RED, _GREEN, _BOLD, _DIM, _OFF = "\033[31m", "\033[32m", "\033[1m", "\033[2m", "\033[0m"

# See the Char production of XML 1.0.
_NOT_IN_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Style = Callable[[str, str], str]


def to_text(report: ExitReport, *, verbose: bool = False, color: bool = False) -> str:
    """Format a report for people: a summary, then the findings with their evidence."""

    def style(text: str, code: str) -> str:
        return f"{code}{text}{_OFF}" if color else text

    verdict = style(summarise(report), _GREEN if report.clean else _RED + _BOLD)
    lines = [f"clean-exit: {verdict}"]
    if report.note:
        lines.append(f"  note: {report.note}")
    if verbose:
        lines.append(f"  command: {shlex.join(report.command)}")
        sides = "inside and outside" if report.probed else "outside only (no probe was loaded)"
        lines.append(f"  observed from {sides}")
    visible = report.findings if verbose else report.findings[:_MAX_FINDINGS]
    for finding in visible:
        lines += _finding_lines(finding, verbose, style)
    hidden = Counter(finding.id for finding in report.findings[len(visible) :])
    if hidden:
        kinds = ", ".join(f"{count} {name}" for name, count in hidden.items())
        lines += ["", f"  ... {hidden.total()} more findings: {kinds} (-v shows them)"]
    return "\n".join(lines)


def _finding_lines(finding: Finding, verbose: bool, style: Style) -> list[str]:
    where = f", {finding.where}" if finding.where else ""
    lines = ["", f"  {style(finding.id, _BOLD)}: {FINDINGS[finding.id]}{where}"]
    lines.append(f"    {finding.summary}")
    evidence = finding.evidence.splitlines()
    if not verbose and len(evidence) > _MAX_LINES:
        hidden = len(evidence) - _MAX_LINES
        evidence = [*evidence[:_MAX_LINES], f"... {hidden} more lines (-v shows them)"]
    lines += [f"    {style('|', _DIM)} {line}" for line in evidence]
    lines.append(style(f"    see {finding.help}", _DIM))
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


def to_junit(reports: Sequence[ExitReport]) -> str:
    """Format reports as JUnit XML, with a test case for each run."""
    from xml.etree import ElementTree

    bad = sum(not report.clean or report.exit_code != 0 for report in reports)
    total_s = sum(report.duration_s for report in reports)
    attributes = {"tests": str(len(reports)), "failures": str(bad), "time": f"{total_s:.3f}"}
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", {"name": "clean-exit", **attributes})
    for number, report in enumerate(reports, start=1):
        name = shlex.join(report.command) + (f" (run {number})" if len(reports) > 1 else "")
        named = {"classname": "clean_exit", "name": _printable(name)}
        case = ElementTree.SubElement(
            suite, "testcase", {**named, "time": f"{report.duration_s:.3f}"}
        )
        if not report.clean or report.exit_code != 0:
            kinds = ", ".join(dict.fromkeys(f.id for f in report.findings)) or "exit code"
            failure = ElementTree.SubElement(
                case, "failure", {"type": kinds, "message": _printable(summarise(report))}
            )
            failure.text = _printable(str(report))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    """Replace the characters that XML cannot contain."""
    return _NOT_IN_XML.sub("\ufffd", text)


def to_github(report: ExitReport) -> str:
    """Format findings as annotations, which GitHub Actions shows with the run."""
    lines = []
    for finding in report.findings[:_MAX_FINDINGS]:
        message = f"{finding.summary}\n{finding.evidence}\nsee {finding.help}"
        lines.append(github_annotation(message, title=f"clean-exit: {finding.id}"))
    return "\n".join(lines)


def github_annotation(message: str, **properties: object) -> str:
    """Return the command of GitHub Actions for an error with a title or a place."""
    pairs = (f"{name}={_escape(str(value), ':,')}" for name, value in properties.items())
    return f"::error {','.join(pairs)}::{_escape(message)}"


def _escape(text: str, more: str = "") -> str:
    return "".join(f"%{ord(char):02X}" if char in f"%\r\n{more}" else char for char in text)
