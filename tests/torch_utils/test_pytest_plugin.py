"""Tests of the pytest plugin: tests that leave memory behind fail, with the name of the holder."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import assert_clean, run, run_forked

SUITE = """
import logging
import unittest
import pytest
import torch
CACHE = []
MODEL = torch.nn.Linear(3, 3)

class App:
    def __init__(self):
        self.cache = []
@pytest.fixture
def model():
    yield torch.nn.Linear(30, 30)
@pytest.fixture(scope="module")
def shared():
    return torch.nn.Linear(40, 40)
@pytest.fixture(scope="session")
def app():
    return App()
@pytest.fixture
def client(app):
    return lambda: app.cache.append(torch.ones(10))
def test_clean(model, client, caplog):
    model(torch.ones(30)).sum().backward()
    kept = torch.ones(10), client
    logging.getLogger("app").error("loss %s", torch.ones(1234))

def test_shared(request):
    request.getfixturevalue("shared")(torch.ones(40))
def test_raises():
    with pytest.raises(RuntimeError, match="shapes") as caught:
        MODEL(torch.ones(4))

def test_gradients():
    MODEL(torch.ones(3)).sum().backward()
class TestClass:
    def setup_class(cls):
        cls.table = torch.ones(77)
    def setup_method(self):
        self.one = torch.ones(78)
    def test_method(self):
        self.other = torch.ones(79)
    def test_by_the_instance(self, app):
        self.cache = app.cache
        self.cache.append(torch.ones(10))

class TestCase(unittest.TestCase):
    def setUp(self):
        self.one = torch.ones(5)
    def test_case(self):
        self.other = torch.ones(99)
def test_leak():
    CACHE.append(torch.ones(1000))
def test_by_the_app(app):
    app.cache.append(torch.ones(10))
def test_by_a_client(client):
    client()
def test_fails():
    CACHE.append(torch.ones(100))
    assert CACHE == 1

@pytest.mark.xfail
def test_xfails():
    CACHE.append(torch.ones(101))
    assert CACHE == 1

@pytest.mark.skip
def test_is_skipped(): ...
"""
LEAKS = {"test_leak", "test_by_the_app", "test_by_a_client", "TestClass::test_by_the_instance"}
PYTEST = """
import gc, os, sys
import pytest
os.chdir(sys.argv[1])
gc.freeze()  # A measurement then does not walk over torch and pytest.
sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def run_suite(folder: Path, suite: str, *options: str) -> tuple[str, list[Any]]:
    """Run pytest on a suite; return its output and the growth that it reports."""
    (folder / "test_suite.py").write_text(suite)
    options = ("--no-growth-report", "growth.json", *options)
    result = run_forked(PYTEST, str(folder), *options, env={"PYTEST_ADDOPTS": ""}, quick_end=True)
    assert result.returncode == 1, str(result)
    (growth,) = json.loads((folder / "growth.json").read_text()).values()
    return result.stdout, growth


@pytest.mark.parametrize(
    ("options", "outcomes", "size"),
    [
        ("--no-growth", "5 failed, 6 passed, 1 skipped, 1 xfailed in ", "4.0 kB"),
        pytest.param("-o no_growth=true -n 2", "1 xfailed in ", "4.0 kB", marks=pytest.mark.slow),
        pytest.param("--no-growth --reruns 1", "4 errors", "8.0 kB", marks=pytest.mark.slow),
    ],
)
def test_only_tests_that_grew_fail_and_name_the_holder(
    options: str, outcomes: str, size: str, tmp_path: Path
) -> None:
    """Also with pytest-xdist and pytest-rerunfailures."""
    output, growth = run_suite(tmp_path, SUITE, *options.split())
    assert outcomes in output, output
    assert f"test_suite.py::test_leak left {size} behind:" in output, output
    assert "held by the variable 'CACHE' of module test_suite: CACHE[" in output
    entries = {one["test"].removeprefix("test_suite.py::"): one["entries"] for one in growth}
    assert entries.keys() <= LEAKS
    if "-n 2" not in options:  # The last test of a worker ends its fixtures too.
        assert entries.keys() == LEAKS
    assert [entry["device"] for entry in entries["test_leak"]] == ["host"]


MARKED = """
import pytest, torch, weakref
CACHE = []

@pytest.mark.no_growth
def test_leaks():
    CACHE.append(torch.ones(10))
@pytest.mark.no_growth(least_bytes=1000)
def test_is_small():
    CACHE.append(torch.ones(10))
def test_is_not_measured():
    CACHE.append(torch.ones(10))
@pytest.mark.no_growth(warmup=1)
def test_name(): ...
@pytest.mark.no_growth(least_bytes="x")
def test_value(): ...
def fail(models):
    model = torch.nn.Linear(300, 300)
    models.append(weakref.ref(model))
    alive = sum(find() is not None for find in models)
    assert model is None, f"{alive} alive"

@pytest.mark.parametrize("number", range(2))
def test_fails(number, models=[]):
    fail(models)
@pytest.mark.no_growth
@pytest.mark.parametrize("number", range(2))
def test_fails_without_growth(number, models=[]):
    fail(models)
"""


def test_marker_measures_one_test_and_drops_the_model_of_a_failed_one(tmp_path: Path) -> None:
    """pytest keeps the tracebacks of failed tests until its summary."""
    output, growth = run_suite(tmp_path, MARKED)
    assert "5 failed, 2 passed, 2 errors in " in output, output
    assert [one["test"] for one in growth] == ["test_suite.py::test_leaks"]
    assert "the marker no_growth takes device, least_bytes, ignore by name" in output
    assert "the marker no_growth: least_bytes must be an int of at least 0, got 'x'" in output
    assert re.findall(r"^E .*(\d) alive$", output, re.M) == ["1", "2", "1", "1"], output
    assert output.count("model = torch.nn.Linear(300, 300)") == 4, "the reports are complete"


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
