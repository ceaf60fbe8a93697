"""A suite of tests with the marker clean_exit, pytest-xdist, pytest-cov and its own option."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.examples.applications.harness import PROGRAMS, environment
from tests.support.programs import TIMEOUT_S, Result

pytestmark = pytest.mark.slow  # Each marked test is a pytest that imports torch.

CLEAN = {
    "test_labels_are_stable[words0]": "passed",
    "test_labels_are_stable[words1]": "passed",
    "test_closed_classifier_cannot_be_used": "passed",
    "test_close_frees_the_layers_and_nothing_else": "passed",
    "test_of_a_closed_classifier": "passed",
    "test_of_an_open_classifier": "passed",
    "test_memory_stays_flat": "skipped",
    "test_exit_after_many_rounds": "skipped",
}


def run_suite(
    python: str, folder: Path, *arguments: str, mutant: str | None = None
) -> tuple[Result, dict[str, str]]:
    """Run pytest in a copy of the suite; return what it did, and the outcomes of the tests."""
    suite = folder / "suite"
    shutil.copytree(PROGRAMS / "suite", suite, ignore=shutil.ignore_patterns("__pycache__"))
    results = suite / "results.xml"
    command = [python, "-m", "pytest", "-n", "2", "--cov", "--cov-report=xml"]
    done = subprocess.run(
        [*command, f"--junit-xml={results}", *arguments],
        cwd=suite,
        env={**os.environ, **environment(mutant)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    outcomes = {}
    for case in ElementTree.parse(results).iter("testcase"):
        problems = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        found = [problems[each.tag] for each in case if each.tag in problems]
        outcomes[case.attrib["name"]] = found[0] if found else "passed"
    return Result(command, done.returncode, done.stdout, done.stderr), outcomes


def check_clean(python: str, folder: Path, *arguments: str, mutant: str | None = None) -> None:
    """The suite passes, each of its classifiers is released once, and all code is covered."""
    done, outcomes = run_suite(python, folder, *arguments, mutant=mutant)
    runs_slow = "--runslow" in arguments
    expected = {name: "passed" if runs_slow else outcome for name, outcome in CLEAN.items()}
    assert outcomes == expected, str(done)
    assert done.returncode == 0, str(done)
    assert done.stderr == "", str(done)
    journals = {file.name: file.read_text() for file in (folder / "suite/journals").iterdir()}
    rounds = {"test_memory_stays_flat": 5, "test_exit_after_many_rounds": 5}
    assert {name: text.count("released\n") for name, text in journals.items()} == {
        name: rounds.get(name, 1) for name, outcome in expected.items() if outcome == "passed"
    }
    coverage = ElementTree.parse(folder / "suite/coverage.xml").getroot()
    assert float(coverage.attrib["line-rate"]) == 1


def check_dirty(python: str, folder: Path, name: str, mutant: str | None = None) -> None:
    """The only test of a file fails, and the message names the error."""
    done, outcomes = run_suite(python, folder, name, mutant=mutant)
    assert Counter(outcomes.values()) == {"failed": 1}, str(done)
    assert done.returncode == 1, str(done)
    assert "AttributeError: 'Model' object has no attribute 'file'" in done.stdout, str(done)


def test_clean_suite_passes(applications_python: str, tmp_path: Path) -> None:
    check_clean(applications_python, tmp_path)


def test_clean_suite_passes_with_slow_tests(applications_python: str, tmp_path: Path) -> None:
    check_clean(applications_python, tmp_path, "--runslow")


def test_error_at_exit_fails(applications_python: str, tmp_path: Path) -> None:
    check_dirty(applications_python, tmp_path, "dirty_exit.py")


def test_destructor_that_raises_in_the_body_fails(applications_python: str, tmp_path: Path) -> None:
    check_dirty(applications_python, tmp_path, "dirty_body.py")


@pytest.mark.parametrize("mutant", ["leak", "skip_destructor"])
def test_sees_a_broken_product(applications_python: str, tmp_path: Path, mutant: str) -> None:
    with pytest.raises(AssertionError):
        check_clean(applications_python, tmp_path, mutant=mutant)


def test_sees_a_blind_plugin(applications_python: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_dirty(applications_python, tmp_path, "dirty_exit.py", "blind_plugin")
