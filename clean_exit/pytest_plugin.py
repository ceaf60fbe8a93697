"""The pytest plugin: the marker and the fixture ``clean_exit``, and the marker ``leaves_nothing``.

A marked test goes through pytest's own protocol, so skips, expected failures, reruns and the
teardown of earlier fixtures work as usual. Only its body runs in another pytest process, the inner
one. That has the command line of this session, so it reads the same settings and loads the same
plugins and conftest files. Its output becomes the failure message.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pytest

if TYPE_CHECKING:
    from clean_exit.report import ExitReport

_VARIABLE = "CLEAN_EXIT_PYTEST"  # set in the inner pytest: the only test that it runs
_DEFAULT_TIMEOUT_S = 300.0
_MAX_CHARACTERS = 4000  # of output
_OWN_VARIABLES = ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_")  # this session's
# Options of this session that the inner pytest must not have: it would remove the temporary
# folders, empty the cache, or write over the reports of this session.
_NOT_PASSED_ON = {"basetemp": None, "cacheclear": False, "log_file": None, "report_log": None}
# Plugins of this session that select tests, repeat them, or wait for a user.
_LEFT_OUT = ("lfplugin", "nfplugin", "stepwiseplugin", "pdbinvoke", "pdbtrace")
_MARKER = (
    "clean_exit(timeout_s=300, max_shutdown_s=5, resource_warnings=False, ignore=(), "
    "children='count'): run this test in a fresh interpreter, and fail it if that interpreter does "
    "not exit cleanly"
)
_LEAVES_NOTHING = (
    "leaves_nothing(ignore=()): fail this test if threads, asyncio tasks or child processes that "
    "it has started are alive after it"
)
# The only test of an inner pytest; "" for any other. pytest 6 has no Config.stash.
_only_tests: WeakKeyDictionary[pytest.Config, str] = WeakKeyDictionary()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings."""
    parser.addini("leaves_nothing", "as the marker, for every test", type="bool", default=False)
    ignored = "regular expressions of what tests may leave behind"
    parser.addini("leaves_nothing_ignore", ignored, type="linelist", default=[])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and make an inner pytest run its only test."""
    config.addinivalue_line("markers", _MARKER)
    config.addinivalue_line("markers", _LEAVES_NOTHING)
    # Removed, so that a pytest process that the test starts is not taken for the inner one.
    _only_tests[config] = os.environ.pop(_VARIABLE, "")
    if _only_tests[config]:
        config.args = [_only_tests[config]]
        for name, value in _NOT_PASSED_ON.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        if plugin := config.pluginmanager.get_plugin("rerunfailures"):
            config.pluginmanager.unregister(plugin)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Tell a surrounding check that a session begins: a test may end the interpreter."""
    probe = sys.modules.get("clean_exit_probe")
    if hasattr(probe, "begin_test"):  # A probe of this version.
        session.config.pluginmanager.register(_ProbedSession(probe, session.config))


class _ProbedSession:
    """Tells a surrounding check which tests run, and which have failed."""

    def __init__(self, probe: Any, config: pytest.Config) -> None:
        self._probe = probe
        self._failed: dict[str, None] = {}
        # pytest-xdist ends its workers itself.
        self._is_worker = hasattr(config, "workerinput")
        if not self._is_worker:
            probe.begin_session()

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record the test."""
        before = self._probe.begin_test(item.nodeid)
        yield
        self._probe.end_test(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Note that a test has failed, or that a file cannot be imported."""
        if report.failed:
            self._failed[report.nodeid] = None

    pytest_collectreport = pytest_runtest_logreport

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Tell the check that the session ends."""
        self._probe.record("test", "")
        is_passed = exitstatus in (0, 5)  # 5: there are no tests.
        failed = [] if is_passed else [*self._failed] or [f"pytest with code {int(exitstatus)}"]
        if not self._is_worker:
            self._probe.end_session(failed)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Keep the test of an inner pytest: the session has selected it. Follow what tests leave."""
    every = list(items)
    yield
    if _only_tests[config]:
        items[:] = every
    has_all = config.getini("leaves_nothing")
    if has_all or any(item.get_closest_marker("leaves_nothing") for item in items):
        from clean_exit.leaves import LeavesNothing

        ignored = config.getini("leaves_nothing_ignore")
        try:
            config.pluginmanager.register(LeavesNothing(has_all=has_all, ignored=ignored))
        except ValueError as error:
            raise pytest.UsageError(f"leaves_nothing_ignore: {error}") from None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Replace the body of a marked test, and its setup, by a run in an inner pytest."""
    marker, config = item.get_closest_marker("clean_exit"), item.config
    if marker and not _only_tests[config] and not config.getoption("setuponly", False):
        item.setup = item.teardown = lambda: None  # type: ignore[method-assign]
        item.runtest = lambda: _run_in_inner_pytest(item, marker)  # type: ignore[method-assign]


def _run_in_inner_pytest(item: pytest.Item, marker: pytest.Mark) -> None:
    from tempfile import TemporaryDirectory

    from clean_exit.checker import check
    from clean_exit.cli import CHECKED

    if not hasattr(item, "path"):
        pytest.fail("the marker clean_exit needs pytest 7 or newer", pytrace=False)
    unknown = sorted(set(marker.kwargs).difference(CHECKED))
    if marker.args or unknown:
        problem = f"has no option {unknown[0]!r}" if unknown else "takes options by name only"
        known = ", ".join(sorted(CHECKED))
        pytest.fail(f"the marker clean_exit {problem}; the options are {known}", pytrace=False)
    with TemporaryDirectory(prefix="clean-exit-pytest-") as folder:
        results = Path(folder, "results.xml")
        with _usage_errors("the marker clean_exit"):
            options = {**_defaults(item.config), **marker.kwargs}
            environment = {k: v for k, v in os.environ.items() if not k.startswith(_OWN_VARIABLES)}
            report = check(
                _command(item.config, results),
                env={**environment, _VARIABLE: _node_id(item)},
                stdin=subprocess.DEVNULL,
                cwd=item.config.invocation_params.dir,
                **options,
            )
        outcome, message = _outcome(results)
    if outcome not in ("failed", "ended") and not report.clean:
        text = f"the interpreter of this test did not exit cleanly\n{report}"
        pytest.fail(text + _output(report), pytrace=False)
    if outcome == "pytest.skip":
        raise pytest.skip.Exception(message, _use_item_location=True)
    if outcome == "pytest.xfail":
        pytest.xfail(message)
    if outcome == "passed" and report.returncode != 0:
        outcome, message = "failed", f"the interpreter of this test exited with {report.returncode}"
    if outcome not in ("passed", "unexpectedly passed"):
        unclean = "" if report.clean else f"\nits interpreter did not exit cleanly\n{report}"
        pytest.fail(f"{message}{unclean}{_output(report)}", pytrace=False)


@contextlib.contextmanager
def _usage_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise pytest.fail.Exception(f"{what}: {error}", pytrace=False) from None


def _node_id(item: pytest.Item) -> str:
    """Return what selects a test; its own id may have the name of a group, which xdist appends."""
    # A relative path: pytest takes "[" in an absolute one for parameters.
    path = os.path.relpath(item.path, item.config.invocation_params.dir)
    names = [n.name for n in item.listchain() if isinstance(n, (pytest.Class, pytest.Item))]
    return "::".join([path, *names])


def _command(config: pytest.Config, results: Path) -> list[str]:
    """Return the command line of this session, with options that make it run one test here."""
    has = config.pluginmanager.hasplugin
    # Words at the end win over the same options in addopts and in the command line.
    command = [sys.executable, "-m", "pytest", *map(str, config.invocation_params.args)]
    command += ["-n", "0"] if has("xdist") else []
    command += ["--no-cov"] if has("pytest_cov") else []  # Coverage measures child processes.
    for plugin in _LEFT_OUT:
        command += ["-p", f"no:{plugin}"]
    # This session applies xfail marks itself.
    return [*command, "-o", "xfail_strict=false", "--no-header", f"--junit-xml={results}"]


def _outcome(results: Path) -> tuple[str, str]:
    """Return the outcome of the test in the JUnit XML of the inner pytest, and a message."""
    from xml.etree import ElementTree

    if not results.exists():
        return "ended", "the interpreter of this test ended before the test did"
    try:
        cases = list(ElementTree.parse(results).iter("testcase"))
    except ElementTree.ParseError:
        return "ended", "the interpreter of this test ended while it wrote its results"
    if not cases:
        return "missing", "the pytest in the fresh interpreter did not run this test"
    skipped: list[tuple[str, str]] = []
    for case in cases:  # One for the test, and one for each of its subtests.
        for element in case.iter():
            message = element.get("message") or ""
            if element.tag in ("failure", "error"):
                # This session applies the xfail mark itself.
                is_strict = message.startswith("[XPASS(strict)]")
                return "unexpectedly passed" if is_strict else "failed", message
            if element.tag == "skipped":
                skipped.append((element.get("type") or "pytest.skip", message))
    return skipped[0] if len(skipped) == len(cases) else ("passed", "")


def _output(report: ExitReport) -> str:
    parts = (("stdout", report.stdout), ("stderr", report.stderr))
    return "".join(f"\n--- {name}\n{text[-_MAX_CHARACTERS:]}" for name, text in parts if text)


def _defaults(config: pytest.Config) -> dict[str, Any]:
    """Return options of check from pyproject.toml."""
    from clean_exit.cli import CHECKED, read_settings

    settings = vars(read_settings(config.rootpath))
    settings["timeout_s"] = settings["timeout_s"] or _DEFAULT_TIMEOUT_S
    return {name: settings[name] for name in CHECKED}


@pytest.fixture
def clean_exit(pytestconfig: pytest.Config) -> Callable[..., ExitReport]:
    """Return a function that runs a program and fails the test if its exit is not clean.

    The function takes a command and the options of `clean_exit.check`, and ``returncode``, the
    expected exit code (0 by default). It returns the `ExitReport`.
    """

    def run(
        script_or_command: str | os.PathLike[str] | list[str],
        *,
        returncode: int = 0,
        **options: Any,
    ) -> ExitReport:
        from clean_exit.checker import check

        with _usage_errors(f"clean_exit({script_or_command!r})"):
            options = {"stdin": subprocess.DEVNULL, **_defaults(pytestconfig), **options}
            report = check(script_or_command, **options)
        if not report.clean:
            pytest.fail(f"{shlex.join(report.command)}\n{report}", pytrace=False)
        if report.returncode != returncode and not (returncode == 0 and report.was_stopped):
            expected = f"it was expected to exit with {returncode}; pass returncode="
            expected += f"{report.returncode} if that is right{_output(report)}"
            pytest.fail(f"{shlex.join(report.command)}\n{report}\n{expected}", pytrace=False)
        return report

    return run
