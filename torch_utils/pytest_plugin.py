"""pytest: the marker and the fixture ``clean_exit``, thin adapters over `torch_utils.clean_exit`.

Loaded in every test session, so nothing is imported before it is needed.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch_utils.clean_exit import ExitReport

_REPORTS_VARIABLE = "CLEAN_EXIT_PYTEST_REPORTS"
_DEFAULT_TIMEOUT_S = 300.0
_MARKER = (
    "clean_exit(timeout_s=300, max_shutdown_s=5, resource_warnings=False, ignore=()): run this "
    "test in a fresh interpreter, and fail it if that interpreter does not leave cleanly"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that sets the default of both."""
    parser.getgroup("clean-exit", "clean exits (torch_utils)").addoption(
        "--clean-exit-timeout",
        type=float,
        default=_DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds that tests with the marker clean_exit, and programs that the fixture "
        "clean_exit runs, may take unless they say otherwise (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    config.addinivalue_line("markers", _MARKER)
    path = os.environ.get(_REPORTS_VARIABLE)
    if path:
        config.pluginmanager.register(_ReportWriter(config, Path(path)), "clean_exit_reports")


class _ReportWriter:
    """Within the fresh interpreter: hands the test's reports to the session that started it."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._config = config
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test elsewhere; its fixtures are not set up here at all."""
    marker = item.get_closest_marker("clean_exit")
    if marker is None or os.environ.get(_REPORTS_VARIABLE):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run_elsewhere(item, marker):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_elsewhere(item: pytest.Item, marker: pytest.Mark) -> list[pytest.TestReport]:
    import subprocess
    import tempfile

    from torch_utils.clean_exit import check

    default = item.config.getoption("clean_exit_timeout")
    options = {"timeout_s": default, **marker.kwargs}
    with tempfile.TemporaryDirectory(prefix="clean-exit-") as folder:
        path = Path(folder, "reports")
        environment = {**os.environ, _REPORTS_VARIABLE: str(path)}
        # Of the worker that this is, if it is one: the other session has none.
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_CURRENT_TEST"):
            environment.pop(name, None)
        try:
            found = check(
                _command(item),
                env=environment,
                stdin=subprocess.DEVNULL,
                cwd=item.config.invocation_params.dir,
                **options,
            )
        except (TypeError, ValueError) as error:
            return [_report(item, "call", "failed", f"the marker clean_exit: {error}", 0.0)]
        reports = _read_reports(item, path)
    return _judge(item, found, reports)


def _command(item: pytest.Item) -> list[str]:
    """Return the command that runs one test, as this session would."""
    config = item.config
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(config.rootpath), "-m", "", "-k", ""]
    if config.inipath is not None:
        command += ["-c", str(config.inipath)]
    if config.pluginmanager.hasplugin("xdist"):
        command += ["-n", "0"]
    for setting in config.getoption("override_ini") or ():
        command += ["-o", setting]
    for warning in config.getoption("pythonwarnings") or ():
        command += ["-W", warning]
    for plugin in config.getoption("plugins") or ():
        command += ["-p", plugin]
    path, _, rest = item.nodeid.partition("::")
    return [*command, f"{config.rootpath / path}::{rest}"]


def _read_reports(item: pytest.Item, path: Path) -> list[pytest.TestReport]:
    if not path.exists():
        return []
    reports = []
    for line in path.read_text(encoding="utf-8").splitlines():
        report = item.config.hook.pytest_report_from_serializable(
            config=item.config, data=json.loads(line)
        )
        report.nodeid, report.location = item.nodeid, item.location
        reports.append(report)
    return reports


def _judge(
    item: pytest.Item, found: ExitReport, reports: list[pytest.TestReport]
) -> list[pytest.TestReport]:
    """Make the reports of both: of the test, and of how its interpreter left."""
    failed = [report for report in reports if report.failed]
    finished = any(report.when == "teardown" for report in reports)
    if failed or (finished and found.clean):
        if failed and not found.clean:
            failed[-1].sections.append(("how the interpreter left", str(found)))
        return reports
    text = f"the interpreter of this test did not leave cleanly\n{found}"
    if not finished:
        text = f"the interpreter of this test ended before the test did\n{found}"
        text += f"\n--- stdout\n{found.stdout[-4000:]}\n--- stderr\n{found.stderr[-4000:]}"
    kept = [report for report in reports if report.when == "setup"]
    setup = kept or [_report(item, "setup", "passed", None, 0.0)]
    call = _report(item, "call", "failed", text, found.duration_s)
    call.sections = [section for report in reports for section in report.sections]
    return [*setup, call, _report(item, "teardown", "passed", None, 0.0)]


def _report(
    item: pytest.Item, when: Any, outcome: Any, text: str | None, duration_s: float
) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=outcome,
        longrepr=text,
        when=when,
        duration=duration_s,
    )


@pytest.fixture
def clean_exit(pytestconfig: pytest.Config) -> Callable[..., ExitReport]:
    """Run a program, and fail the test with the evidence if it does not leave cleanly.

    Takes a path to a Python file, a command line (a list, or a string that is split as a shell
    does), and the options of `torch_utils.clean_exit.check`; ``returncode`` is what the program
    is expected to exit with, 0 by default. Returns the `ExitReport`.
    """

    def run(
        script_or_command: str | os.PathLike[str] | list[str],
        *,
        returncode: int = 0,
        timeout_s: float | None = pytestconfig.getoption("clean_exit_timeout"),
        **options: Any,
    ) -> ExitReport:
        import subprocess

        from torch_utils.clean_exit import check

        options.setdefault("stdin", subprocess.DEVNULL)
        report = check(script_or_command, timeout_s=timeout_s, **options)
        if not report.clean:
            pytest.fail(f"{shlex.join(report.command)}\n{report}", pytrace=False)
        if report.returncode != returncode and not (returncode == 0 and report.was_stopped):
            output = f"--- stdout\n{report.stdout[-4000:]}\n--- stderr\n{report.stderr[-4000:]}"
            expected = f"it was expected to exit with {returncode}"
            pytest.fail(
                f"{shlex.join(report.command)}\n{report}\n{expected}\n{output}", pytrace=False
            )
        return report

    return run
