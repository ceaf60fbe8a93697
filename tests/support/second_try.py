"""A pytest plugin that runs tests that failed a second time, by themselves.

With `--second-try FILE`, a test that passes then does not fail the run. It is listed in the last
lines of the output and in the file as flaky. A run that broke off gets no second try, because not
all of its tests have run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOST = 10  # More failures than this do not come from a busy machine.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--second-try", metavar="FILE", type=Path, help="list flaky tests in FILE")


class SecondTry:
    """Decide in the process that reports, which with xdist is not one that runs tests."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.flaky: list[str] = []
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if exitstatus != pytest.ExitCode.TESTS_FAILED or reporter is None:
            return
        reports = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
        self.failed = sorted({report.nodeid for report in reports})
        for test in self.failed if len(self.failed) <= MOST else ():
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
            done = subprocess.run(command, cwd=session.config.invocation_params.dir, check=False)
            if done.returncode == 0:
                self.flaky.append(test)
        with self.file.open("a") as file:
            file.writelines(f"{test}\n" for test in self.flaky)
        if self.flaky == self.failed:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.failed) > MOST:
            terminalreporter.line(
                f"no second try: {len(self.failed)} failures are more than {MOST}"
            )
        if self.flaky:
            terminalreporter.section("flaky: failed, then passed by itself")
            for test in self.flaky:
                terminalreporter.line(test)


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("second_try")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondTry(file.absolute()))
