"""One test in a pytest of its own: how that is started, what it is told, what it reports.

The other pytest gets the options of this one as values, as pytest-xdist's workers do, and not its
command line: that would select, order and report, and what ``addopts`` adds may do the same.
"""

from __future__ import annotations

import json
import os
import pickle
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "CLEAN_EXIT_PYTEST"  # names the folder in which both meet
# Variables that are this session's own.
_OWN_VARIABLES = (
    "PYTEST_ADDOPTS",
    "PYTEST_CURRENT_TEST",
    "PYTEST_XDIST_WORKER",
    "PYTEST_XDIST_WORKER_COUNT",
    "PYTEST_XDIST_TESTRUNUID",
)
# What selects and orders tests, or says when to stop; what writes reports, or asks the user; and
# what has to be an argument. By what pytest calls them, of it and of widespread plug-ins.
_NOT_PASSED_ON = set(
    """
    file_or_dir keyword markexpr deselect ignore ignore_glob pyargs keepduplicates maxfail
    continue_on_collection_errors lf failedfirst newfirst last_failed_no_failures stepwise
    stepwise_skip stepwise_reset cacheshow cacheclear splits group
    xmlpath junitprefix report_log pastebin debug durations durations_min resultlog htmlpath
    json_report json_report_file allure_report_dir md_report report log_file log_file_mode
    usepdb usepdb_cls trace capture collectonly setuponly setupshow setupplan help version markers
    showfixtures show_fixtures_per_test no_header no_summary
    plugins override_ini inifilename rootdir basetemp disable_plugin_autoload
    numprocesses maxprocesses dist tx px looponfail rsyncdir rsyncignore testrunuid
    maxworkerrestart xdist_tx
    reruns reruns_delay only_rerun rerun_except fail_on_flaky
    """.split()  # noqa: SIM905  A line for each kind, not for each name.
)
_PREFIXES_NOT_PASSED_ON = ("cov_", "no_cov", "benchmark_", "html_", "allure_", "clean_exit_told")
# `python -m pytest` puts the current folder on sys.path, the command pytest does not.
_LIKE_THE_COMMAND = (
    "import sys; sys.path.remove(''); import pytest; sys.exit(pytest.console_main())"
)


def prepare(item: pytest.Item, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Write what the other pytest has to know, and return its command and environment."""
    options = {}
    for name, value in vars(item.config.option).items():
        if name in _NOT_PASSED_ON or name.startswith(_PREFIXES_NOT_PASSED_ON) or value is None:
            continue
        try:
            options[name] = pickle.dumps(value)
        except Exception:  # Pickling runs any code. Such a value no command line gave.
            continue
    # pytest-rerunfailures: what is run again gets an interpreter of its own.
    options["force_reruns"] = pickle.dumps(0)
    told = {
        "end": _below_file(item),
        "options": options,
        "variables": {k: os.environ[k] for k in ("PYTEST_ADDOPTS",) if k in os.environ},
    }
    (folder / "told").write_bytes(pickle.dumps(told))
    environment = {k: v for k, v in os.environ.items() if k not in _OWN_VARIABLES}
    return _command(item, folder), {**environment, VARIABLE: str(folder)}


def _command(item: pytest.Item, folder: Path) -> list[str]:
    config = item.config
    here = config.invocation_params.dir
    by_module = bool({"", str(here)} & set(sys.path))
    command = [sys.executable, *(["-m", "pytest"] if by_module else ["-c", _LIKE_THE_COMMAND])]
    command += ["--rootdir", str(config.rootpath), "--no-header", "--capture", "fd"]
    if config.inipath is not None:
        command += ["-c", str(config.inipath)]
    if config.getoption("disable_plugin_autoload", False):
        command.append("--disable-plugin-autoload")
    # The cache is shared, but for what the other session would write about the last run.
    for plugin in ("lfplugin", "nfplugin", "stepwise"):
        command += ["-p", f"no:{plugin}"]
    for setting in config.getoption("override_ini") or ():
        command += ["-o", setting]
    command += ["-o", f"addopts={shlex.join(_plugins(config))}"]
    basetemp = config.getoption("basetemp", None)
    if basetemp:  # One session empties it; two must not have the same.
        command += ["--basetemp", str(Path(f"{Path(basetemp).absolute()}-{folder.name}"))]
    # Relative, as pytest takes "[" in an argument for parameters.
    return [*command, os.path.relpath(item.path, here) + _below_file(item)]


def _plugins(config: pytest.Config) -> list[str]:
    """Return the arguments that load plug-ins, and keep them away.

    To be read with addopts: one that is kept away by the command line itself has no options,
    nor settings, and those that are there, or are given here, would be unknown.
    """
    arguments = []
    for plugin in config.getoption("plugins") or ():
        # A worker of xdist has no terminal; here it says what went wrong.
        if not (plugin == "no:terminal" and hasattr(config, "workerinput")):
            arguments += ["-p", plugin]
    return arguments


def _below_file(item: pytest.Item) -> str:
    """Return the end of the node id. xdist adds a group to the whole of it, but not to names."""
    nodes = item.listchain()
    files = [n for n, node in enumerate(nodes) if isinstance(node, pytest.File)]
    return "".join(f"::{node.name}" for node in nodes[max(files, default=0) + 1 :])


class Told:
    """Within the other pytest: what it was told, and where it reports to.

    As a plug-in, it keeps the one test from being deselected, and writes the reports.
    """

    def __init__(self, folder: Path) -> None:
        told = pickle.loads((folder / "told").read_bytes())
        self._path = folder / "reports"
        self._end: str = told["end"]
        self._options: dict[str, bytes] = told["options"]
        self._config: pytest.Config | None = None
        # For the test, the environment is that of the session that it belongs to.
        os.environ.update(told["variables"])

    def set_options(self, config: pytest.Config) -> None:
        """Set them, before conftests read them; what they make themselves has to wait for them."""
        self._config = config
        for name, data in list(self._options.items()):
            try:
                value = pickle.loads(data)
            except Exception:  # Its class may be a conftest's, which is not there yet.
                continue
            del self._options[name]
            for namespace in (config.option, config.known_args_namespace):
                setattr(namespace, name, value)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Any:
        """Undo what selects: the other session has done that."""
        before = list(items)
        yield
        items[:] = [item for item in before if _below_file(item) == self._end]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a report."""
        assert self._config is not None
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data, default=str) + "\n")


def read_reports(
    item: pytest.Item, folder: Path
) -> tuple[dict[str, pytest.TestReport], list[pytest.TestReport]]:
    """Return the reports of one test by phase, and those of its subtests.

    By phase the last ones, if it was run again there.
    """
    path = folder / "reports"
    reports: dict[str, pytest.TestReport] = {}
    subtests: list[pytest.TestReport] = []
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    for line in lines[:-1]:
        report = item.config.hook.pytest_report_from_serializable(
            config=item.config, data=json.loads(line)
        )
        report.nodeid, report.location = item.nodeid, item.location
        # JSON knows no tuples, and pytest asks for them.
        if isinstance(report.longrepr, list):
            report.longrepr = tuple(report.longrepr)
        report.sections = [tuple(section) for section in report.sections]
        report.user_properties = [tuple(pair) for pair in report.user_properties]
        is_test = type(report) is pytest.TestReport  # Those of subtests have their own class.
        if not is_test:
            subtests.append(report)
        elif report.outcome != "rerun":
            reports[report.when] = report
    return reports, subtests
