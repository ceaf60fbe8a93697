"""Tests that fail are never called clean, however a program loses their outcome."""

import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clean_exit import check

PYTEST = f"{sys.executable} -m pytest -q -p no:cacheprovider -p no:hypothesispytest -p no:anyio"
WRONG = "def test_wrong(): assert 1 == 2\n"
MAIN = """
import sys, pytest
def run(*names): return pytest.main(["-q", "-p", "no:cacheprovider", *names])
def write_and_run(text):
    open("test_two.py", "w").write(text)
    run("test_two.py")
"""
CASES = """
import sys, unittest
class Case(unittest.TestCase):
    def test_wrong(self): self.assertEqual(1, 2)
class Good(unittest.TestCase):
    def test_good(self): pass
def load(case): return unittest.defaultTestLoader.loadTestsFromTestCase(case)
def run(case=Case): return unittest.TextTestRunner().run(load(case))
"""


@dataclass(frozen=True)
class Way:
    """A program, the files beside it, and how it is started.

    Attributes:
        program: The code of main.py.
        says: A part of the finding, if there is one.
        files: Other files, by name; by default a test that fails.
        command: For a shell, instead of ``python main.py``.
        returncode: The program's exit code.
    """

    program: str = ""
    says: str = "test_one.py::test_wrong"
    files: dict[str, str] = field(default_factory=lambda: {"test_one.py": WRONG})
    command: str = ""
    returncode: int = 0


def conftest(hook: str) -> Way:
    return Way(files={"test_one.py": WRONG, "conftest.py": f"import os\n{hook}\n"}, command=PYTEST)


def case(program: str, says: str = "test_wrong", returncode: int = 0) -> Way:
    return Way(CASES + textwrap.dedent(program), says, {}, returncode=returncode)


def main(
    program: str, says: str = "test_one.py::test_wrong", one: str = WRONG, returncode: int = 0
) -> Way:
    return Way(MAIN + program, says, {"test_one.py": one}, returncode=returncode)


REPEATED = """
import os
def test_flaky():
    if not os.path.exists("once"):
        os.makedirs("once")
        raise OSError
"""
LOST = {
    "unittest: result not used": case("run()"),
    "unittest: os._exit at exit": case("import atexit, os\natexit.register(os._exit, 0)\nrun()"),
    "unittest: unexpected success": case(
        "Good.test_good = unittest.expectedFailure(Good.test_good)\nrun(Good)", "test_good"
    ),
    "unittest: class is not set up": case(
        "Good.setUpClass = lambda: 1 / 0\nrun(Good)", "setUpClass"
    ),
    "unittest: a result without a runner": case("load(Case).run(unittest.TestResult())"),
    "unittest: subtest": case(
        """
        class Sub(unittest.TestCase):
            def test_many(self):
                with self.subTest(n=3): self.fail()
        run(Sub)
        run(Good)
        """,
        "test_many (n=3)",
    ),
    "main without exit": main("run()"),
    "main in a thread": main("import threading\nt = threading.Thread(target=run)\nt.start()"),
    "another file passes": main("run('test_one.py')\nwrite_and_run('def test_good(): pass')"),
    "another file passes after an error": main(
        "run('test_one.py')\nwrite_and_run('def test_good(): pass')",
        "test_one.py",
        one="import absent",
    ),
    "missing file": main("run('test_absent.py')\nrun('main.py')", "pytest with code 4"),
    "exec": main("import os\nrun()\nos.execvp('true', ['true'])"),
    "file with an error": main("run()", "test_one.py", one="import absent"),
    "fixture that fails": main(
        "run()", one="import pytest\n@pytest.fixture\ndef f(): 1 / 0\ndef test_wrong(f): pass"
    ),
    "xdist": main("run('-n', '2')"),
    "os._exit at exit": main(
        "sys.exit(run())", one=f"import atexit, os\natexit.register(os._exit, 0)\n{WRONG}"
    ),
    "os._exit in sessionfinish": conftest("def pytest_sessionfinish(): os._exit(0)"),
    "os._exit in unconfigure": conftest("def pytest_unconfigure(): os._exit(0)"),
    "status changed": conftest("def pytest_sessionfinish(session): session.exitstatus = 0"),
    "shell": Way(command=f"{PYTEST}; true"),
    "shell with two sessions": Way(
        files={"test_one.py": WRONG, "test_two.py": "def test_good(): pass"},
        command=f"{PYTEST} test_one.py; {PYTEST} test_two.py",
    ),
    "shell with another Python first": Way(command=f"{sys.executable} -c 1; {PYTEST}; true"),
    "pipe": Way(command=f"{PYTEST} | cat"),
}
KEPT = {
    "unittest: code of its own": case("sys.exit(not run().wasSuccessful())", returncode=1),
    "unittest: repeated": case("run()\nCase.test_wrong = lambda self: None\nrun()"),
    "unittest: expected failure": case(
        "Case.test_wrong = unittest.expectedFailure(Case.test_wrong)\nrun()"
    ),
    "unittest: run within a test": case(
        """
        class Outer(unittest.TestCase):
            def test_inner(self): self.assertFalse(run().wasSuccessful())
        run(Outer)
        """
    ),
    "code of its own": main("sys.exit(run())", returncode=1),
    "repeated": main("run()\nrun()", one=REPEATED),
    "repeated after an error": main(
        "write_and_run('import absent')\nwrite_and_run('def test_good(): pass')"
    ),
    "repeated by a shell": Way(files={"test_one.py": REPEATED}, command=f"{PYTEST} || {PYTEST}"),
    "rerun": main("run('--reruns', '2')", one=REPEATED),
    "no tests": main("run()", one=""),
    "expected failure": main("run()", one=f"import pytest\n@pytest.mark.xfail\n{WRONG}"),
    "pytester": main(
        "sys.exit(run('-p', 'pytester'))",
        one="""
            import pytest
            @pytest.mark.parametrize("how", ["inprocess", "subprocess"])
            def test_inner(pytester, how):
                pytester.makepyfile("def test_wrong(): assert 0")
                getattr(pytester, f"runpytest_{how}")().assert_outcomes(failed=1)
        """,
    ),
    "child of a Python program": main(
        f"import subprocess\nassert subprocess.run({PYTEST.split()!r}).returncode == 1"
    ),
}
QUICK = {"unittest: subtest", "main without exit", "repeated"}


@pytest.mark.parametrize(
    ("way", "is_lost"),
    [
        pytest.param(way, name in LOST, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, way in {**LOST, **KEPT}.items()
    ],
)
def test_only_a_lost_outcome_is_a_finding(way: Way, is_lost: bool, tmp_path: Path) -> None:
    """Tests that pass when they are repeated, and those of a nested session, do not count."""
    for name, text in {"main.py": way.program, **way.files}.items():
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    command = ["sh", "-c", way.command] if way.command else [sys.executable, "main.py"]
    report = check(command, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert report.returncode == way.returncode, report
    assert [found.id for found in report.findings] == ["failed-tests"] * is_lost, report
    for finding in report.findings:
        assert way.says in finding.evidence
        assert finding.summary == f"{finding.evidence} failed, but the exit code is 0"
        assert report.exit_code == 120
        if "::" in way.says:
            assert finding.test == way.says
