"""pytest: the marker and the fixture ``clean_exit``, thin adapters over `clean_exit.check`.

A marked test goes through pytest's own protocol, so that skipping, expected failures, reruns and
teardown of what came before are as ever. Only its body is that of another pytest: the test runs
there, and fails here with what that one printed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from clean_exit.report import ExitReport

_VARIABLE = "CLEAN_EXIT_PYTEST"  # set in the other pytest, which runs marked tests itself
_DEFAULT_TIMEOUT_S = 300.0
_MOST_LETTERS = 4000  # of output
_OWN_VARIABLES = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_")  # this session's
_MARKER = (
    "clean_exit(timeout_s=300, max_shutdown_s=5, resource_warnings=False, ignore=()): run this "
    "test in a fresh interpreter, and fail it if that interpreter does not leave cleanly"
)
_OPTIONS = {"timeout_s", "max_shutdown_s", "resource_warnings", "ignore"}
_is_other = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.getgroup("clean-exit", "clean exits").addoption(
        "--clean-exit-timeout",
        type=_seconds,
        metavar="S",
        help="seconds that tests with the marker clean_exit, and programs that the fixture "
        "clean_exit runs, may take unless they say otherwise (default: timeout in the table "
        f"[tool.clean-exit] of pyproject.toml, else {_DEFAULT_TIMEOUT_S:g})",
    )
    parser.addini(
        "clean_exit_args",
        "arguments of the pytest that runs a test with the marker clean_exit, such as options of "
        "other plugins",
        type="args",
    )


def _seconds(text: str) -> float:
    from clean_exit.cli import seconds

    return seconds(text)


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marker."""
    config.addinivalue_line("markers", _MARKER)
    # Removed, so that a pytest that the test starts is not taken for the other one.
    config.stash[_is_other] = os.environ.pop(_VARIABLE, None) is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have a marked test run elsewhere; nothing of it is set up here."""
    marker = item.get_closest_marker("clean_exit")
    if marker is None or item.config.stash[_is_other] or item.config.getoption("setuponly", False):
        return

    def runtest() -> None:
        _run_elsewhere(item, marker)

    item.setup = item.teardown = lambda: None  # type: ignore[method-assign]
    item.runtest = runtest  # type: ignore[method-assign]


def _run_elsewhere(item: pytest.Item, marker: pytest.Mark) -> None:
    from tempfile import TemporaryDirectory

    from clean_exit.checker import check

    unknown = sorted(set(marker.kwargs) - _OPTIONS)
    if marker.args or unknown:
        what = f"has no option {unknown[0]!r}" if unknown else "takes options by name only"
        known = ", ".join(sorted(_OPTIONS))
        pytest.fail(f"the marker clean_exit {what}; there are {known}", pytrace=False)
    wrong = ""
    with TemporaryDirectory(prefix="clean-exit-pytest-") as folder:
        results = Path(folder, "results.xml")
        try:
            options = {**_defaults(item.config), **marker.kwargs}
            environment = {k: v for k, v in os.environ.items() if not k.startswith(_OWN_VARIABLES)}
            report = check(
                _command(item, results),
                env={**environment, _VARIABLE: "1"},
                stdin=subprocess.DEVNULL,
                cwd=item.config.invocation_params.dir,
                **options,
            )
        except (TypeError, ValueError) as error:
            wrong = f"the marker clean_exit: {error}"
        outcome, message = _outcome(results)
    if wrong:  # Not in the handler: one error is enough.
        pytest.fail(wrong, pytrace=False)
    if outcome != "failed" and not report.clean:
        text = f"the interpreter of this test did not leave cleanly\n{report}"
        pytest.fail(text + _output(report), pytrace=False)
    if outcome == "pytest.skip":
        pytest.skip(message)
    if outcome == "pytest.xfail":
        pytest.xfail(message)
    if outcome == "passed" and report.returncode != 0:
        outcome, message = "failed", f"the interpreter of this test exited with {report.returncode}"
    if outcome not in ("passed", "unexpectedly passed"):
        unclean = "" if report.clean else f"\nits interpreter did not leave cleanly\n{report}"
        pytest.fail(f"{message}{unclean}{_output(report)}", pytrace=False)


def _command(item: pytest.Item, results: Path) -> list[str]:
    """Return the command of a pytest that runs one test.

    It has the same settings but for ``addopts``, which may select, order and report.
    """
    config = item.config
    # Relative, as pytest takes "[" in an argument for parameters.
    path = os.path.relpath(item.path, config.invocation_params.dir)
    # Not by the node id, whose end may name a group of xdist's.
    names = [n.name for n in item.listchain() if isinstance(n, (pytest.Class, pytest.Item))]
    command = [sys.executable, "-m", "pytest", "::".join([path, *names])]
    command += ["--rootdir", str(config.rootpath)]
    if config.inipath is not None:
        command += ["-c", str(config.inipath)]
    plugins: list[str] = []
    # The cache is shared, but for what this session writes about its last run.
    private = ("no:lfplugin", "no:nfplugin", "no:stepwise")
    for plugin in (*(config.getoption("plugins") or ()), *private):
        # A worker of xdist has no terminal; here it says what went wrong.
        plugins += ["-p", plugin] if plugin != "no:terminal" else []
    # Read with addopts, plugins that are kept away still have their settings.
    settings = ("xfail_strict=false", f"addopts={shlex.join(plugins)}")
    for setting in (*(config.getoption("override_ini") or ()), *settings):
        command += ["-o", setting]
    for warning in config.getoption("pythonwarnings") or ():
        command += ["-W", warning]
    command += ["--no-header", f"--junit-xml={results}"]
    return [*command, *config.getini("clean_exit_args")]


def _outcome(results: Path) -> tuple[str, str]:
    """Return how the one test went, as its XML says it, and a message."""
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
            message = element.get("message") or element.tag
            if element.tag in ("failure", "error"):
                # Whether a test that has to fail did, this session judges by its own mark.
                is_strict = message.startswith("[XPASS(strict)]")
                return "unexpectedly passed" if is_strict else "failed", message
            if element.tag == "skipped":
                skipped.append((element.get("type") or "pytest.skip", message))
    return skipped[0] if len(skipped) == len(cases) else ("passed", "")


def _output(report: ExitReport) -> str:
    parts = (("stdout", report.stdout), ("stderr", report.stderr))
    return "".join(f"\n--- {name}\n{text[-_MOST_LETTERS:]}" for name, text in parts if text)


def _defaults(config: pytest.Config) -> dict[str, Any]:
    """Return options of check: those of the table in pyproject.toml, and the command line's."""
    from clean_exit.cli import read_settings

    settings = read_settings(config.rootpath)
    asked = config.getoption("clean_exit_timeout")
    return {
        "timeout_s": asked or settings.timeout or _DEFAULT_TIMEOUT_S,
        "max_shutdown_s": settings.max_shutdown,
        "resource_warnings": settings.resource_warnings,
        "ignore": settings.ignore or (),
    }


@pytest.fixture
def clean_exit(pytestconfig: pytest.Config) -> Callable[..., ExitReport]:
    """Run a program, and fail the test with the evidence if it does not leave cleanly.

    Takes a path to a Python file, a command line (a list, or a string that is split as a shell
    does), and the options of `clean_exit.check`; ``returncode`` is what the program is expected to
    exit with, 0 by default. Returns the `ExitReport`.
    """

    def run(
        script_or_command: str | os.PathLike[str] | list[str],
        *,
        returncode: int = 0,
        **options: Any,
    ) -> ExitReport:
        from clean_exit.checker import check

        wrong = ""
        try:
            options = {"stdin": subprocess.DEVNULL, **_defaults(pytestconfig), **options}
            report = check(script_or_command, **options)
        except (OSError, ValueError) as error:
            wrong = f"clean_exit({script_or_command!r}): {error}"
        if wrong:  # Not in the handler: one error is enough.
            pytest.fail(wrong, pytrace=False)
        if not report.clean:
            pytest.fail(f"{shlex.join(report.command)}\n{report}", pytrace=False)
        if report.returncode != returncode and not (returncode == 0 and report.was_stopped):
            expected = f"it was expected to exit with {returncode}; say returncode="
            expected += f"{report.returncode} if that is right{_output(report)}"
            pytest.fail(f"{shlex.join(report.command)}\n{report}\n{expected}", pytrace=False)
        return report

    return run
