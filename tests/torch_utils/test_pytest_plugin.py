"""Tests of the pytest plugin: tests that leave memory behind fail, with the name of the holder."""

import json
import sys

import pytest

from tests.support.programs import assert_clean, run

SUITE = """
import unittest

import pytest
import torch

CACHE = []
MODEL = torch.nn.Linear(3, 3)


@pytest.fixture
def model():
    inner = torch.nn.Linear(30, 30)
    yield inner


@pytest.fixture(scope="module")
def shared():
    return torch.nn.Linear(40, 40)


@pytest.fixture(scope="session")
def late():
    inner = [torch.ones(50)]
    yield "a name"
    inner.clear()


def test_clean(model):
    model(torch.ones(30)).sum().backward()

def test_leak():
    CACHE.append(torch.ones(1000))

def test_shared(shared):
    shared(torch.ones(40))

def test_late(request):
    request.getfixturevalue("late")

def test_raises():
    with pytest.raises(RuntimeError) as caught:
        MODEL(torch.ones(4))
    assert "shapes" in str(caught.value)

def test_fails():
    CACHE.append(torch.ones(100))
    assert CACHE == 1

@pytest.mark.xfail
def test_xfails():
    CACHE.append(torch.ones(101))
    assert CACHE == 1

@pytest.mark.skip
def test_is_skipped(): ...

class TestClass:
    def setup_class(cls):
        cls.table = torch.ones(77)
    def setup_method(self):
        self.one = torch.ones(78)
    def test_method(self):
        self.other = torch.ones(79)

class TestCase(unittest.TestCase):
    def setUp(self):
        self.one = torch.ones(5)
    def test_case(self):
        self.other = torch.ones(99)

def test_gradients():
    MODEL(torch.ones(3)).sum().backward()

@pytest.mark.parametrize("tensor", [torch.ones(5)])
def test_parameter(tensor):
    tensor.sum()

def test_log(caplog):
    import logging
    logging.getLogger("app").error("loss %s", torch.ones(1234))
"""
IN_CACHE = "a tensor (1000,) float32, held by the variable 'CACHE' of module test_suite: CACHE[0]"
OPTIONS = ("-p", "torch_utils.pytest_plugin", "-p", "no:cacheprovider")


def in_own_process(pytester: pytest.Pytester, *options: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)


def test_only_the_test_that_grew_fails_and_names_the_holder(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_suite=SUITE)
    result = in_own_process(pytester, "--no-growth", "--no-growth-report", "growth.json")
    result.assert_outcomes(passed=9, failed=2, xfailed=1, skipped=1)
    result.stdout.fnmatch_lines(["test_suite.py::test_leak left 4.0 kB behind:"])
    assert IN_CACHE in result.stdout.str()
    assert "test_fails left" not in result.stdout.str()
    ((growth,),) = json.loads((pytester.path / "growth.json").read_text()).values()
    assert growth["test"] == "test_suite.py::test_leak"
    (entry,) = growth["entries"]
    assert (entry["nbytes"], entry["device"]) == (4000, "host")


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-n", "2"), ("--reruns", "1")])
def test_other_plugins_work_as_usual(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    pytester.makepyfile(test_suite=SUITE)
    more = ("--no-growth-report", "growth.json", "-o", "no_growth=true")
    result = in_own_process(pytester, *options, *more)
    assert "held by the variable 'CACHE' of module test_suite: CACHE[" in result.stdout.str()
    assert "test_clean left" not in result.stdout.str()
    growth = json.loads((pytester.path / "growth.json").read_text())["growth"]
    assert {one["test"] for one in growth} == {"test_suite.py::test_leak"}


def test_marker_measures_one_test_with_its_arguments(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
import pytest, torch
CACHE = []

@pytest.mark.no_growth
def test_leaks():
    CACHE.append(torch.ones(10))

@pytest.mark.no_growth(least_bytes=1000)
def test_is_small():
    CACHE.append(torch.ones(10))

def test_is_not_measured():
    CACHE.append(torch.ones(10))
""")
    result = in_own_process(pytester, "--no-growth-report", "growth.json")
    result.assert_outcomes(passed=2, failed=1)
    assert len(json.loads((pytester.path / "growth.json").read_text())["growth"]) == 1
    pytester.makepyfile("""
import pytest

@pytest.mark.no_growth(warmup=1)
def test_name(): ...

@pytest.mark.no_growth(least_bytes="x")
def test_value(): ...
""")
    result = in_own_process(pytester)
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["the marker no_growth takes device, least_bytes, ignore by name"])
    result.stdout.fnmatch_lines(["the marker no_growth: least_bytes must be an int *, got 'x'"])


def test_leaks_into_fixtures_of_a_wider_scope_are_found(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
import pytest, torch

class App:
    cache = None

@pytest.fixture(scope="session")
def app():
    app = App()
    app.cache = []
    return app

@pytest.fixture
def client(app):
    return lambda: app.cache.append(torch.ones(10))

def test_by_the_app(app):
    app.cache.append(torch.ones(10))

def test_by_a_client(client):
    client()

class TestClass:
    def test_by_the_instance(self, app):
        self.cache = app.cache
        self.cache.append(torch.ones(10))

def test_clean(client):
    kept = torch.ones(10), client
""")
    for options, outcomes in (
        (("--no-growth",), {"failed": 3, "passed": 1}),
        (("--no-growth", "--reruns", "1"), None),
    ):
        result = in_own_process(pytester, *options)
        if outcomes is not None:
            result.assert_outcomes(**outcomes)
        assert "test_by_a_client left " in result.stdout.str()
        assert "test_clean left" not in result.stdout.str()


KEEPING = """
import pytest, torch, weakref
KEPT = []

@pytest.mark.parametrize("number", range(3))
def test_fails(number):
    alive = sum(find() is not None for find in KEPT)
    model = torch.nn.Linear(300, 300)
    KEPT.append(weakref.ref(model.weight))
    print("alive", alive)
    assert model.weight.sum() == 123
"""


def test_failed_tests_keep_no_models(pytester: pytest.Pytester) -> None:
    """pytest keeps their tracebacks until its summary."""
    pytester.makepyfile(KEEPING)
    control = in_own_process(pytester)
    assert "alive 2" in control.stdout.str()
    result = in_own_process(pytester, "--no-growth")
    result.assert_outcomes(failed=3)
    assert "alive 1" not in result.stdout.str()
    assert "model = torch.nn.Linear(300, 300)" in result.stdout.str(), "the report is complete"


def test_plugin_costs_nothing_without_tests_to_measure() -> None:
    program = """
    import sys
    import pytest
    before = set(sys.modules)
    import torch_utils.pytest_plugin
    new = {name for name in set(sys.modules) - before if name.startswith(("torch", "json"))}
    assert "torch" not in new and "torch_utils._census" not in new, new
    """
    assert_clean(run(program))
    assert "torch_utils.pytest_plugin" in sys.modules, "the entry point is installed"
