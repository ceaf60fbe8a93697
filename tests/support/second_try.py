"""A pytest plugin for continuous integration: a run is green by evidence only.

With `--second-try FILE`, a test that failed is run again, by itself. If it passes then, it does not
fail the run, and is listed as flaky in the last lines of the output and in the file. A run that
broke off gets no second try, because not all of its tests have run.

With `--at-least COUNT`, a run with fewer passed tests fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

MOST = 10  # More failures than this do not come from a busy machine.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--second-try", metavar="FILE", type=Path, help="list flaky tests in FILE")
    parser.addoption("--at-least", metavar="COUNT", type=int, default=0, help="passed tests")


def passes(test: str, folder: Path) -> bool:
    """Run a test by itself; a crash or a skip is not a pass."""
    test = re.sub(r"@[^\]@/]+$", "", test)  # xdist adds the group of a test to its id.
    with tempfile.TemporaryDirectory() as name:
        report = Path(name, "report.xml")
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, test], cwd=folder, check=False
        )
        if done.returncode or not report.exists():
            return False
        cases = list(ElementTree.parse(report).iter("testcase"))
    return bool(cases) and not any(len(case.findall("*")) for case in cases)


class SecondTry:
    """Decide in the process that reports, which with xdist is not one that runs tests."""

    def __init__(self, file: Path | None, at_least: int) -> None:
        self.file = file
        self.at_least = at_least
        self.failed: list[str] = []
        self.flaky: list[str] = []
        self.problems: list[str] = []
        self.lost_worker = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.lost_worker |= bool(error)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reports = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
        self.failed = sorted({report.nodeid for report in reports})
        passed = len(reporter.stats.get("passed", ()))
        broke_off = session.shouldfail or session.shouldstop
        is_failed = exitstatus == pytest.ExitCode.TESTS_FAILED and bool(self.failed)
        if is_failed and not broke_off and self.file is not None:
            self.try_again(session.config.invocation_params.dir)
            passed += len(self.flaky)
            if self.flaky == self.failed:
                session.exitstatus = pytest.ExitCode.OK
        if self.lost_worker and not self.failed:
            self.problems.append("a worker died, and no test explains it")
        if passed < self.at_least:
            self.problems.append(f"{passed} tests passed, fewer than {self.at_least}")
        if self.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def try_again(self, folder: Path) -> None:
        if len(self.failed) > MOST:
            self.problems.append(f"no second try: {len(self.failed)} failures are more than {MOST}")
            return
        self.flaky = [test for test in self.failed if passes(test, folder)]
        assert self.file is not None
        with self.file.open("a") as file:
            file.writelines(f"{test}\n" for test in self.flaky)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for problem in self.problems:
            terminalreporter.line(problem, red=True)
        if self.flaky:
            terminalreporter.section("flaky: failed, then passed by itself")
            for test in self.flaky:
                terminalreporter.line(test)


def pytest_configure(config: pytest.Config) -> None:
    file, at_least = config.getoption("second_try"), config.getoption("at_least")
    if (file is not None or at_least) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondTry(file and file.absolute(), at_least))
