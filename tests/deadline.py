"""A plugin that takes no new test once the time is up, and says which files did not get theirs.

``NO_NEW_TEST_AFTER`` in the environment is a time in seconds since the epoch; `.ci/run` sets it
for the slow tests. A test under way then runs to its end, and one that fails decides as ever.
Every worker of xdist skips for itself; who reports, reports for all.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

VARIABLE = "NO_NEW_TEST_AFTER"
REASON = "no time left"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Skip before any fixture is made, which may take as long as a test."""
    if time.time() > float(os.environ.get(VARIABLE, "inf")):
        pytest.skip(REASON)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many ran, and which files have some that did not."""
    left_out: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        if isinstance(report.longrepr, tuple) and report.longrepr[2] == f"Skipped: {REASON}":
            left_out[report.nodeid.partition("::")[0]] += 1
    if not left_out:
        return
    ran = sum(
        report.when == "call"
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
    )
    terminalreporter.section(REASON)
    for file, count in sorted(left_out.items()):
        terminalreporter.line(f"{file}: {count} did not run")
    terminalreporter.line(f"{ran} tests ran, {left_out.total()} did not")
