"""The pytest plugin: tests that leave tensor memory behind fail, with the name of what holds it.

The marker ``no_growth``, the option ``--no-growth`` and the setting ``no_growth = true`` switch it
on. Nothing but this module is loaded before a test needs it.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False  # see _runtime
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

_MARKER = (
    "no_growth(device=None, least_bytes=1, ignore=()): fail this test if it leaves tensor memory "
    "behind; see torch_utils.no_growth"
)
_ADVICE = (
    "If it is made only once, such as a lazy buffer, make it in a fixture of the module. If it is "
    "a cache that is meant, pass its owner as ignore= to the marker no_growth."
)
_ARGUMENTS = ("device", "least_bytes", "ignore")


def pytest_addoption(parser: Any) -> None:
    """Add the options and the setting."""
    group = parser.getgroup("torch_utils")
    group.addoption(
        "--no-growth",
        action="store_true",
        help="fail each test that leaves tensor memory behind, and name what holds it",
    )
    group.addoption(
        "--no-growth-report",
        metavar="FILE",
        help="write the growth of all tests to a JSON file",
    )
    parser.addini("no_growth", "as --no-growth, for every run", type="bool", default=False)


def pytest_configure(config: Any) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)
    if config.getoption("--no-growth-report"):
        config.pluginmanager.register(_Report(config), "torch_utils_growth_report")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Switch the measurement on if a test is to be measured."""
    has_all = config.getoption("--no-growth") or config.getini("no_growth")
    if has_all or any(item.get_closest_marker("no_growth") for item in items):
        plugin = _make_plugin(has_all)
        config.pluginmanager.register(plugin, "torch_utils_growth")
        config.pluginmanager.register(plugin.protocol, "torch_utils_growth_protocol")


class _Report:
    """Writes what grew to a file, also that of the workers of pytest-xdist."""

    def __init__(self, config: Any) -> None:
        self._path = config.getoption("--no-growth-report")
        self._growth: dict[str, Any] = {}  # The last of a test that was repeated.
        with open(self._path, "w", encoding="utf-8"):  # noqa: PTH123  (fails at once, not at the end)
            pass

    def pytest_runtest_logreport(self, report: Any) -> None:
        for name, value in report.user_properties:
            if name == "no_growth":
                self._growth[report.nodeid] = json.loads(value)

    def pytest_sessionfinish(self, session: Any) -> None:
        if not hasattr(session.config, "workerinput"):
            with open(self._path, "w", encoding="utf-8") as file:  # noqa: PTH123
                json.dump({"growth": [*self._growth.values()]}, file, indent=2)


def _make_plugin(has_all: bool) -> Any:
    import pytest
    from _pytest.runner import runtestprotocol

    from torch_utils._growth import GrowthMeasurement, describe_growth
    from torch_utils._oom import clear_exception_frames

    class Growth:
        """Measures each test from before its setup until after its teardown."""

        def __init__(self) -> None:
            self._measurement: Any = None
            self._previous: Any = None
            self._entries: tuple[Any, ...] = ()
            self._has_failed = self._amends_later = False
            self._problem = ""
            self.protocol = Protocol(self)

        def arguments_of(self, item: Any) -> dict[str, Any] | None:
            """Return how a test is measured; None if it is not."""
            marker = item.get_closest_marker("no_growth")
            if marker is None:
                return {} if has_all else None
            return dict(marker.kwargs)

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_protocol(self, item: Any) -> Generator[None, Any, Any]:
            arguments = self.arguments_of(item)
            self._entries, self._has_failed, self._problem = (), False, ""
            marker = item.get_closest_marker("no_growth")
            if marker is not None and (marker.args or not {*marker.kwargs} <= {*_ARGUMENTS}):
                self._problem = f"the marker no_growth takes {', '.join(_ARGUMENTS)} by name"
            elif arguments is not None:
                try:
                    # Between two tests only pytest runs.
                    self._measurement = GrowthMeasurement(**arguments, after=self._previous)
                except (TypeError, ValueError) as error:
                    self._problem = f"the marker no_growth: {error}"
            try:
                return (yield)
            finally:
                self._previous, self._measurement = self._measurement, None

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_setup(self) -> None:
            if self._problem:
                pytest.fail(self._problem, pytrace=False)

        @pytest.hookimpl(wrapper=True)
        def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
            measurement = self._measurement
            if measurement is None or fixturedef.scope == "function":
                return (yield)
            with measurement.expecting():  # It outlives the test.
                return (yield)

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
            report: Any = yield
            self._has_failed = self._has_failed or not report.passed
            if call.when == "teardown" and not self._amends_later:
                self._measure(item)
                self._amend(item, report)
            return report

        def _measure(self, item: Any) -> None:
            if self._measurement is not None and not self._has_failed:
                # pytest keeps these until the end of the protocol; nothing needs them any more.
                item.funcargs = {}
                for name in ("_instance", "_obj"):
                    vars(item).pop(name, None)
                self._entries = self._measurement.growth()

        def _amend(self, item: Any, report: Any) -> None:
            if self._entries:
                report.outcome = "failed"
                report.longrepr = describe_growth(item.nodeid, self._entries, _ADVICE)
                entries = [one.as_dict() for one in self._entries]
                text = json.dumps({"test": item.nodeid, "entries": entries})
                report.user_properties.append(("no_growth", text))

        @pytest.hookimpl(trylast=True)
        def pytest_exception_interact(self, node: Any, call: Any) -> None:
            """Drop the variables of a failed test, which its traceback would keep."""
            is_test = hasattr(node, "get_closest_marker") and hasattr(node, "runtest")
            if is_test and self.arguments_of(node) is not None and not node.config.option.usepdb:
                clear_exception_frames(call.excinfo.value)

    class Protocol:
        """Fails the call of a test instead of its teardown, where no plugin repeats tests."""

        def __init__(self, growth: Any) -> None:
            self._growth = growth

        def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool | None:
            growth = self._growth
            repeats = getattr(item.config.option, "reruns", None)
            if growth.arguments_of(item) is None or repeats or item.get_closest_marker("flaky"):
                return None
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            growth._amends_later = True
            try:
                reports = runtestprotocol(item, nextitem=nextitem, log=False)
            finally:
                growth._amends_later = False
            growth._measure(item)
            for report in reports:
                if report.when == "call":
                    growth._amend(item, report)
                item.ihook.pytest_runtest_logreport(report=report)
            item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            return True

    return Growth()
