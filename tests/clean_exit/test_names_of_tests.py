"""A finding in a suite of tests names the test that it is about."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clean_exit import FINDINGS, check
from tests.support.clean_exit import CHECKER, run_command

# Each test is about one kind of finding, which its name says.
SUITE = """
import asyncio, multiprocessing, os, subprocess, sys, threading, weakref
from multiprocessing.shared_memory import SharedMemory
import pytest
kept = []

def python(code):
    subprocess.run([sys.executable, "-c", code])
class Raises:
    def __del__(self): raise ValueError("lost")
def test_good(): pass
def test_orphan_process_that_is_forked():  # Early: it keeps the files of later ones open.
    if not os.fork(): threading.Event().wait()

@pytest.mark.parametrize("text", ["a b", "c (d)::e"])
def test_unraisable(text): Raises()
def test_ignored(): Raises()
class TestInClass:
    def test_unraisable(self): Raises()
@pytest.fixture
def raising():
    yield
    Raises()

def test_unraisable_in_teardown(raising): pass
def test_unraisable_in_a_task():
    async def main(): await asyncio.create_task(work())
    async def work(): Raises()
    asyncio.run(main())

def test_thread_error():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()

def test_finalizer_error(): weakref.finalize(set(), lambda: 1 / 0)
def test_atexit_error(): python("import atexit; atexit.register(lambda: 1 / 0)")
def test_crash(): python("import os; os.abort()")
def test_leaked_shared_memory(): kept.append(SharedMemory(create=True, size=10))
def test_leaked_semaphore():
    python("import multiprocessing as m, os; m.set_start_method('spawn'); kept = m.Lock()\\n"
           "os._exit(0)")

def test_resource_warning(): open(os.devnull)
def test_orphan_process(): kept.append(subprocess.Popen(["sleep", "999"]))
def test_orphan_process_of_a_shell(): subprocess.run("sleep 999 &", shell=True)
@pytest.mark.parametrize("n", range(20))
def test_good_after(n): pass
"""


def kind(test: str) -> str:
    """Return the finding that a test of the suite is named after."""
    name = test.rpartition("::test_")[2]
    return next(one for one in FINDINGS if name.startswith(one.replace("-", "_")))


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["-n", "2"], marks=pytest.mark.slow),
        pytest.param(["--reruns", "1", "-p", "no:randomly"], marks=pytest.mark.slow),
    ],
)
def test_each_finding_has_its_test(options: list[str], tmp_path: Path) -> None:
    """In the JSON report, the text and the annotations; --ignore matches it, too."""
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    # What is still referenced at the end of the session is reported without a test.
    ignored = ["--ignore", "still running in Popen", "--ignore", "test_ignored"]
    report = ["--github", "--report-json", "r.json", "--resource-warnings"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = run_command([*CHECKER, *report, *ignored, "--", *command], cwd=tmp_path)
    (run,) = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["runs"]
    assert run["returncode"] == 0, done.stdout
    named = {(finding["id"], finding["test"]) for finding in run["findings"]}
    tests = re.findall(r"^def (test_\w+)", SUITE, re.MULTILINE)
    faulty = {f"test_suite.py::{name}" for name in tests if not re.search("good|ignored", name)}
    faulty.remove("test_suite.py::test_unraisable")
    faulty |= {f"test_suite.py::test_unraisable[{text}]" for text in ("a b", "c (d)::e")}
    faulty.add("test_suite.py::TestInClass::test_unraisable")
    assert named == {(kind(test), test) for test in faulty}, done.stderr
    assert ", in test_suite.py::test_unraisable[a b]" in done.stderr
    assert "in Raises.__del__()%0Ain test_suite.py::test_unraisable[a b]%0A" in done.stderr
    assert "::error file=test_suite.py" in done.stderr


@pytest.mark.parametrize(
    ("body", "found"),
    [("os.abort()", "crash"), pytest.param("time.sleep(999)", "hang", marks=pytest.mark.slow)],
)
def test_end_within_a_test_names_it(body: str, found: str, tmp_path: Path) -> None:
    text = f"import os, time\ndef test_good(): pass\ndef test_bad(): {body}\n"
    (tmp_path / "test_one.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    timeout_s = 10.0 if found == "hang" else None
    report = check(command, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout_s=timeout_s)
    (finding,) = report.findings
    assert (finding.id, finding.test) == (found, "test_one.py::test_bad"), report


RAISES = """
import asyncio, threading, unittest
class Raises:
    def __del__(self): raise ValueError
"""
UNITTEST = """
class Case(unittest.TestCase):
    def test_bad(self): Raises()
    def test_good(self): pass
unittest.main()
"""
WITHOUT_TESTS = """
async def work(): Raises()
async def main(): await asyncio.create_task(work(), name="load")
asyncio.run(main())
thread = threading.Thread(target=lambda: Raises() and None, name="writer")
thread.start()
thread.join()
Raises()
"""


@pytest.mark.parametrize(
    ("program", "names"),
    [(UNITTEST, ["__main__.Case.test_bad"]), (WITHOUT_TESTS, ["task load", "thread writer", ""])],
    ids=["unittest", "without-tests"],
)
def test_outside_of_pytest_the_case_the_task_or_the_thread_is_named(
    program: str, names: list[str]
) -> None:
    report = check(["-c", RAISES + program])
    assert [finding.test for finding in report.findings] == names
