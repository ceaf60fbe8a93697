"""A finding in a suite of tests names the test that it is about."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from clean_exit import check
from tests.support.clean_exit import CHECKER, ENVIRONMENT, run_command

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

@pytest.mark.parametrize("n", range(100))
def test_good(n): pass

def test_orphan_process_that_is_forked():  # Early: it keeps the files of later ones open.
    if not os.fork():
        threading.Event().wait()

@pytest.mark.parametrize("text", ["a b", "c (d)::e"])
def test_unraisable(text): Raises()

class TestInClass:
    def test_unraisable(self): Raises()

@pytest.fixture
def raising():
    yield
    Raises()

def test_unraisable_in_teardown(raising): pass

def test_unraisable_in_a_task():
    async def main():
        await asyncio.create_task(asyncio.sleep(0))
        Raises()
    asyncio.run(main())

def test_thread_error():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()

def test_finalizer_error():
    weakref.finalize(set(), lambda: 1 / 0)

def test_atexit_error(): python("import atexit; atexit.register(lambda: 1 / 0)")

def test_slow_shutdown(): python("import atexit, time; atexit.register(time.sleep, 7)")

def test_crash(): python("import os; os.abort()")

def test_leaked_shared_memory():
    kept.append(SharedMemory(create=True, size=10))

def test_leaked_semaphore():
    python("import multiprocessing as m, os; m.set_start_method('spawn'); kept = m.Lock()\\n"
           "os._exit(0)")

def test_resource_warning(): open(os.devnull)

def test_resource_warning_of_a_coroutine():
    async def wait(): pass
    wait()

def test_logging_error():
    python("import atexit, logging, io; logging.basicConfig(stream=io.StringIO())\\n"
           "logging.root.handlers[0].stream.close(); atexit.register(logging.error, 'bye')")

def test_process_group_not_destroyed():
    python("import sys, types; m = types.ModuleType('torch.distributed')\\n"
           "m.is_initialized = lambda: True; m.get_backend = lambda: 'gloo'\\n"
           "sys.modules['torch.distributed'] = m")

def test_orphan_process(): kept.append(subprocess.Popen(["sleep", "999"]))

def test_orphan_process_of_a_shell(): subprocess.run("sleep 999 &", shell=True)

@pytest.mark.parametrize("n", range(100, 200))
def test_good_after(n): pass
"""


def kind(test: str) -> str:
    """Return the finding that a test of the suite is named after."""
    name = test.partition("test_")[2].rpartition("test_")[2].partition("[")[0]
    return next(one for one in KINDS if name.startswith(one.replace("-", "_")))


KINDS = (
    "unraisable thread-error finalizer-error atexit-error slow-shutdown crash leaked-shared-memory "
    "leaked-semaphore resource-warning logging-error process-group-not-destroyed orphan-process"
).split()


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["-n", "2"], marks=pytest.mark.slow),
        pytest.param(["--reruns", "1", "-p", "no:randomly"], marks=pytest.mark.slow),
    ],
)
def test_each_finding_has_its_test(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    report = check(
        command,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        resource_warnings=True,
        # What is still referenced at the end of the session is reported without a test.
        ignore=["still running in Popen"],
    )
    assert report.returncode == 0, report.stdout
    named = {(finding.id, finding.test) for finding in report.findings}
    tests = [line.partition("(")[0].removeprefix("def ") for line in SUITE.splitlines()
             if line.startswith("def test_")]  # fmt: skip
    faulty = {f"test_suite.py::{name}" for name in tests if "good" not in name}
    faulty -= {"test_suite.py::test_unraisable"}
    faulty |= {"test_suite.py::test_unraisable[a b]", "test_suite.py::test_unraisable[c (d)::e]",
               "test_suite.py::TestInClass::test_unraisable"}  # fmt: skip
    assert named == {(kind(test), test) for test in faulty}, report


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("os._exit(0)", "unfinished-tests"),
        ("os.abort()", "crash"),
        ("time.sleep(999)", "hang"),
    ],
)
def test_end_within_a_test_names_it(body: str, found: str, tmp_path: Path) -> None:
    text = f"import os, time\ndef test_good(): pass\ndef test_bad(): {body}\n"
    (tmp_path / "test_one.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    timeout_s = 10.0 if found == "hang" else None
    report = check(command, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout_s=timeout_s)
    (finding,) = report.findings
    assert (finding.id, finding.test) == (found, "test_one.py::test_bad"), report


UNITTEST = """
import unittest
class Raises:
    def __del__(self): raise ValueError
class Case(unittest.TestCase):
    def test_bad(self): Raises()
    def test_good(self): pass
unittest.main()
"""


def test_test_of_unittest_is_named_by_its_id() -> None:
    report = check(["-c", UNITTEST])
    (finding,) = report.findings
    assert (finding.id, finding.test) == ("unraisable", "__main__.Case.test_bad")


WITHOUT_TESTS = """
import asyncio, threading
class Raises:
    def __del__(self): raise ValueError
async def work(): Raises()
async def main(): await asyncio.create_task(work(), name="load")
asyncio.run(main())
thread = threading.Thread(target=lambda: Raises() and None, name="writer")
thread.start()
thread.join()
Raises()
"""


def test_outside_of_tests_the_task_or_the_thread_is_named() -> None:
    report = check(["-c", WITHOUT_TESTS])
    assert [finding.test for finding in report.findings] == ["task load", "thread writer", ""]


def test_text_json_and_annotations_have_the_test(tmp_path: Path) -> None:
    code = """
        class Raises:
            def __del__(self): raise ValueError("lost")
        def test_bad(): Raises()
    """
    (tmp_path / "test_one.py").write_text(textwrap.dedent(code), encoding="utf-8")
    options = ["--github", "--report-json", "report.json", "--", sys.executable, "-m", "pytest"]
    done = run_command([*CHECKER, *options], cwd=tmp_path, env=ENVIRONMENT)
    assert "(while the main module ran, in test_one.py::test_bad)" in done.stderr
    assert "::error file=test_one.py" in done.stderr
    assert "::ValueError: lost in Raises.__del__()%0Ain test_one.py::test_bad%0A" in done.stderr
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["runs"][0]["findings"][0]["test"] == "test_one.py::test_bad"
    options = ["--ignore", "test_bad", *options[3:]]
    assert run_command([*CHECKER, *options], cwd=tmp_path, env=ENVIRONMENT).returncode == 0
