"""pytest: the marker and the fixture ``clean_exit``, thin adapters over `torch_utils.clean_exit`.

Loaded in every test session, by a name that a project's own ``torch_utils`` cannot hide (see
`_torch_cleanup`), so nothing is imported before it is needed, and never as ``torch_utils`` unless
that is this package.

A marked test goes through pytest's own protocol, so that skipping, expected failures, reruns and
teardown of what came before are as ever; only that its setup runs it in another pytest, and that
its reports are those of the other.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .clean_exit import ExitReport
    from .clean_exit.fresh_pytest import Told

_VARIABLE = "CLEAN_EXIT_PYTEST"  # as in fresh_pytest
_DEFAULT_TIMEOUT_S = 300.0
_MARKER = (
    "clean_exit(timeout_s=300, max_shutdown_s=5, resource_warnings=False, ignore=()): run this "
    "test in a fresh interpreter, and fail it if that interpreter does not leave cleanly"
)
_told: pytest.StashKey[Told] = pytest.StashKey()
_reports = pytest.StashKey[dict[str, pytest.TestReport]]()
_subtests = pytest.StashKey[list[pytest.TestReport]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that sets the default of both."""
    parser.getgroup("clean-exit", "clean exits (torch_utils)").addoption(
        "--clean-exit-timeout",
        type=_seconds,
        metavar="S",
        help="seconds that tests with the marker clean_exit, and programs that the fixture "
        "clean_exit runs, may take unless they say otherwise (default: timeout in the table "
        f"[tool.clean-exit] of pyproject.toml, else {_DEFAULT_TIMEOUT_S:g})",
    )


def _seconds(text: str) -> float:
    from .clean_exit.values import seconds

    return seconds(text)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Within the fresh interpreter: take over the options of the session that started it."""
    # Removed, so that a pytest that the test starts is not taken for this one.
    folder = os.environ.pop(_VARIABLE, None)
    if folder is not None:
        from .clean_exit.fresh_pytest import Told

        told = early_config.stash[_told] = Told(Path(folder))
        told.set_options(early_config)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    config.addinivalue_line("markers", _MARKER)
    if _told in config.stash:
        config.stash[_told].set_options(config)
        config.pluginmanager.register(config.stash[_told], "clean_exit_told")


def _marker(item: pytest.Item) -> pytest.Mark | None:
    """Return the marker of a test that is to run elsewhere."""
    if _told in item.config.stash or item.config.getoption("setuponly", False):
        return None
    return item.get_closest_marker("clean_exit")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Run a marked test elsewhere; nothing of it is set up here at all."""
    item.stash[_reports], item.stash[_subtests] = {}, []  # of an earlier run, if it is run again
    marker = _marker(item)
    if marker is None:
        return
    from tempfile import TemporaryDirectory

    for step in ("setup", "runtest", "teardown"):
        setattr(item, step, _do_nothing)
    with TemporaryDirectory(prefix="clean-exit-") as folder:
        _run_elsewhere(item, marker, Path(folder))


def _do_nothing() -> None:
    pass


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Give the other interpreter's report of a phase for this one's."""
    if call.when == "call":
        # Where a subtest fails its test may pass: what counts is that it was reported.
        for subtest in item.stash.get(_subtests, ()):
            item.ihook.pytest_runtest_logreport(report=subtest)
    outcome = yield
    report = item.stash.get(_reports, {}).pop(call.when, None)
    if report is not None:
        outcome.force_result(report)


def _run_elsewhere(item: pytest.Item, marker: pytest.Mark, folder: Path) -> None:
    import inspect
    import subprocess

    from .clean_exit.fresh_pytest import prepare, read_reports

    command, environment = prepare(item, folder)
    try:
        if marker.args:
            raise TypeError("it takes options by name only")
        check = _clean_exit().check
        known = inspect.signature(check).parameters
        if unknown := [name for name in marker.kwargs if name not in known]:
            raise TypeError(
                f"it has no option {unknown[0]}; it has timeout_s, max_shutdown_s, "
                "resource_warnings and ignore"
            )
        found = check(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            cwd=item.config.invocation_params.dir,
            **{**_defaults(item.config), **marker.kwargs},
        )
    except (TypeError, ValueError) as error:
        _fail(item, f"the marker clean_exit: {error}")
        return
    reports, subtests = read_reports(item, folder)
    item.stash[_reports], item.stash[_subtests] = reports, subtests
    if "teardown" not in reports:
        text = f"the interpreter of this test ended before the test did\n{found}"
        text += f"\n--- stdout\n{found.stdout[-4000:]}\n--- stderr\n{found.stderr[-4000:]}"
        reports.pop("call", None)
        _fail(item, text)
    elif not found.clean:
        _judge(item, found, reports)


def _judge(item: pytest.Item, found: ExitReport, reports: dict[str, pytest.TestReport]) -> None:
    """Fail a test that went well but left uncleanly; one that failed gets the evidence as well."""
    failed = [report for report in reports.values() if _has_failed(report)]
    if failed:
        failed[-1].sections.append(("how the interpreter left", str(found)))
        return
    text = f"the interpreter of this test did not leave cleanly\n{found}"
    if "call" not in reports:  # It was skipped in its setup, and this phase is the last one.
        del reports["setup"]
        pytest.fail(text, pytrace=False)
    sections = reports.pop("call").sections
    for title, content in sections:
        if title.startswith("Captured ") and title.endswith(" call"):
            item.add_report_section("call", title.split()[1], content)
    _fail(item, text)


def _has_failed(report: pytest.TestReport) -> bool:
    """Say whether a test failed, expected or not. One that had to fail and did not has not."""
    if report.outcome == "failed":
        return not str(report.longrepr).startswith("[XPASS(strict)]")
    return report.outcome == "skipped" and hasattr(report, "wasxfail")


def _fail(item: pytest.Item, text: str) -> None:
    """Have the test itself fail, here and in its turn: whether that was expected, pytest knows."""

    def runtest() -> None:
        pytest.fail(text, pytrace=False)

    item.runtest = runtest  # type: ignore[method-assign]


def _clean_exit() -> Any:
    """Import `torch_utils.clean_exit`, by that name if it is the one that tests would import."""
    from importlib import import_module
    from importlib.util import find_spec

    try:
        spec = find_spec("torch_utils")
    except (ImportError, ValueError):  # Something else has that name, and is no package.
        spec = None
    folder = Path(__file__).resolve().parent
    if spec is not None and spec.origin and Path(spec.origin).resolve().parent == folder:
        return import_module("torch_utils.clean_exit")
    return import_module(".clean_exit", __package__)


def _defaults(config: pytest.Config) -> dict[str, Any]:
    """Return options of check: those of the table in pyproject.toml, and the command line's."""
    from .clean_exit.settings import read_settings

    settings = read_settings(config.rootpath)
    options = {"timeout_s": settings.get("timeout", _DEFAULT_TIMEOUT_S)}
    names = {"max_shutdown": "max_shutdown_s"}
    for name in ("max_shutdown", "resource_warnings", "ignore"):
        if name in settings:
            options[names.get(name, name)] = settings[name]
    asked = config.getoption("clean_exit_timeout")
    return options if asked is None else {**options, "timeout_s": asked}


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
        **options: Any,
    ) -> ExitReport:
        import subprocess

        try:
            options = {"stdin": subprocess.DEVNULL, **_defaults(pytestconfig), **options}
        except ValueError as error:
            pytest.fail(str(error), pytrace=False)
        report: ExitReport = _clean_exit().check(script_or_command, **options)
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
