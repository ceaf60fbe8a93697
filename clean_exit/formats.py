"""The formats of a report for machines: JSON and GitHub annotations."""

from __future__ import annotations

import os
import re

from clean_exit.options import github_annotation
from clean_exit.report import SCHEMA_VERSION, ExitReport

_PLACE = re.compile(r'^ *File "(?P<path>[^"]+)", line (?P<line>\d+)', re.MULTILINE)


def to_json(report: ExitReport) -> str:
    """Format a report as JSON; docs/clean-exit.md describes the schema."""
    import json  # Here, because most runs do not need it.

    runs = [report.to_json()]
    whole = {"schema_version": SCHEMA_VERSION, "clean": report.clean, "runs": runs}
    return json.dumps(whole, indent=2)


def to_github(report: ExitReport) -> str:
    """Format findings as annotations, which GitHub Actions shows with the run or in the code."""
    lines = []
    for finding in report.findings:
        test = f"in {finding.test}\n" if finding.test else ""
        message = f"{finding.summary}\n{test}{finding.evidence}\nsee {finding.help}"
        place = _place(finding.evidence) or _file_of(finding.test)
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


def _file_of(test: str) -> dict[str, object]:
    """Return the file of a test by its node id, as pytest shows it."""
    path = test.partition("::")[0]
    return {"file": path} if os.path.isfile(path) else {}  # noqa: PTH113
