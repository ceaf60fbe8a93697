"""A plugin that prints the table of the matrix, and fails where its control has failed.

The root `conftest.py` names it: with xdist it is the controller that reports, and the
controller collects nothing, so it never reads a conftest file of this folder.
"""

from __future__ import annotations

import pytest

# Fewer naive destructors than this prove nothing, as when one row is run by hand.
CONTROL_SIZE = 20

Table = dict[tuple[str, str], list[bool]]


def outcomes(reporter: pytest.TerminalReporter) -> Table:
    """Collect which programs were fine, by subject and Python."""
    table: Table = {}
    for reports in reporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "hazard" and report.when == "call":
                    subject, version, fine = value
                    table.setdefault((subject, version), []).append(fine)
    return table


def control_failed(table: Table) -> bool:
    """Whether no naive destructor fell short: the matrix would then prove nothing."""
    naive = [fine for (subject, _), fine in table.items() if subject.startswith("naive")]
    return sum(map(len, naive)) > CONTROL_SIZE and all(all(fine) for fine in naive)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    table = outcomes(terminalreporter)
    if not table:
        return
    terminalreporter.section("hazard matrix")
    others = sorted({version for _, version in table if version[0].isdigit()})
    terminalreporter.line(f"other Pythons: {', '.join(others) or 'none was run'}")
    for (subject, version), fine in sorted(table.items()):
        short = fine.count(False)
        verdict = f"{short} fall short" if short else "all fine"
        terminalreporter.line(f"{subject:12} {version:12} {len(fine):4} programs, {verdict}")
    if control_failed(table):
        terminalreporter.line("no naive destructor fell short; the control has failed", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the session if its control has failed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    is_worker = hasattr(session.config, "workerinput")
    if reporter is not None and not is_worker and control_failed(outcomes(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
