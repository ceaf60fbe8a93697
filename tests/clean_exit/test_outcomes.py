"""Tests that fail are never called clean, however a program loses their outcome."""

import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clean_exit import ExitReport, check

PYTEST = f"{sys.executable} -m pytest -q -p no:cacheprovider -p no:hypothesispytest -p no:anyio"
WRONG = "def test_wrong(): assert 1 == 2\n"
MAIN = """
    import sys, pytest
    def run(*names): return pytest.main(["-q", "-p", "no:cacheprovider", *names])
"""
CASES = """
    import sys, unittest
    class Case(unittest.TestCase):
        def test_wrong(self): self.assertEqual(1, 2)
    def run(case=Case):
        return unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(case))
"""


@dataclass(frozen=True)
class Way:
    """A program, the files beside it, and how it is started.

    Attributes:
        program: The code of main.py.
        files: Other files, by name; by default a test that fails.
        command: For a shell, instead of ``python main.py``.
        says: A part of the finding.
    """

    program: str = ""
    files: dict[str, str] = field(default_factory=lambda: {"test_one.py": WRONG})
    command: str = ""
    says: str = "test_one.py::test_wrong"

    def run(self, folder: Path) -> ExitReport:
        for name, text in {"main.py": self.program, **self.files}.items():
            (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
        command = ["sh", "-c", self.command] if self.command else [sys.executable, "main.py"]
        return check(command, cwd=folder, stdin=subprocess.DEVNULL)


def conftest(hook: str, body: str) -> Way:
    files = {"test_one.py": WRONG, "conftest.py": f"import os\ndef {hook}: {body}\n"}
    return Way(files=files, command=PYTEST)


def case(program: str, says: str = "test_wrong") -> Way:
    return Way(textwrap.dedent(CASES) + textwrap.dedent(program), {}, says=says)


def main(program: str, says: str = "test_one.py::test_wrong") -> Way:
    return Way(textwrap.dedent(MAIN) + textwrap.dedent(program), says=says)


LOST = {
    "unittest: result not used": case("run()"),
    "unittest: main(exit=False)": case("unittest.main(exit=False)"),
    "unittest: os._exit at exit": case("import atexit, os\natexit.register(os._exit, 0)\nrun()"),
    "unittest: SystemExit caught": case("try: unittest.main()\nexcept SystemExit: pass"),
    "unittest: subtest": case(
        """
        class Sub(unittest.TestCase):
            def test_many(self):
                with self.subTest(n=3): self.fail()
        run(Sub)
        """,
        "test_many (n=3)",
    ),
    "unittest: unexpected success": case(
        """
        class Expected(unittest.TestCase):
            @unittest.expectedFailure
            def test_good(self): pass
        run(Expected)
        """,
        "test_good",
    ),
    "unittest: class is not set up": case(
        """
        class Unready(unittest.TestCase):
            @classmethod
            def setUpClass(cls): raise OSError
            def test_good(self): pass
        run(Unready)
        """,
        "setUpClass",
    ),
    "unittest: a result without a runner": case(
        "unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(unittest.TestResult())"
    ),
    "unittest: a result of its own": case(
        "class Result(unittest.TextTestResult):\n"
        "    def startTestRun(self): pass\n"
        "    def stopTestRun(self): pass\n"
        "unittest.TextTestRunner(resultclass=Result).run(Case('test_wrong'))"
    ),
    "unittest: another suite passes": case(
        """
        class Sub(unittest.TestCase):
            def test_many(self):
                with self.subTest(n=3): self.fail()
        class Good(unittest.TestCase):
            def test_good(self): pass
        run(Sub)
        run(Good)
        """,
        "test_many (n=3)",
    ),
    "unittest: suites in threads": case(
        """
        import concurrent.futures, time
        class Slow(unittest.TestCase):
            def test_slow(self): time.sleep(1)
        with concurrent.futures.ThreadPoolExecutor() as pool: list(pool.map(run, [Slow, Case]))
        """
    ),
    "unittest: a runner of its own": case(
        "class Runner(unittest.TextTestRunner): pass\n"
        "Runner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Case))"
    ),
    "os._exit at exit": Way(
        files={"test_one.py": f"import atexit, os\natexit.register(os._exit, 0)\n{WRONG}"},
        command=PYTEST,
    ),
    "main without exit": main("run()"),
    "main in a thread": main(
        "import threading\nt = threading.Thread(target=run)\nt.start()\nt.join()"
    ),
    "SystemExit caught": main("try: sys.exit(run())\nexcept SystemExit: pass"),
    "another session passes": main(
        "open('test_two.py', 'w').write('def test(): 1')\nrun('test_one.py')\nrun('test_two.py')"
    ),
    "missing file": main("run('test_absent.py')\nrun('main.py')", "pytest with code 4"),
    "another file passes": main(
        "open('test_two.py', 'w').write('import absent')\nrun('test_two.py')\n"
        "open('test_three.py', 'w').write('def test_good(): pass')\nrun('test_three.py')",
        "test_two.py",
    ),
    "exec": main("import os\nrun()\nos.execvp('true', ['true'])"),
    "os._exit in sessionfinish": conftest("pytest_sessionfinish()", "os._exit(0)"),
    "os._exit in unconfigure": conftest("pytest_unconfigure()", "os._exit(0)"),
    "status changed": conftest("pytest_sessionfinish(session)", "session.exitstatus = 0"),
    "file with an error": Way(
        "import pytest; pytest.main(['-q'])", {"test_one.py": "import absent"}, says="test_one.py"
    ),
    "fixture that fails": Way(
        "import pytest; pytest.main(['-q'])",
        {"test_one.py": "import pytest\n@pytest.fixture\ndef f(): 1 / 0\ndef test_wrong(f): pass"},
    ),
    "xdist": Way("import pytest; pytest.main(['-q', '-n', '2'])"),
    "shell": Way(command=f"{PYTEST}; true"),
    "shell with two sessions": Way(
        command=f"{PYTEST} test_one.py; {PYTEST} test_two.py",
        files={"test_one.py": WRONG, "test_two.py": "def test_good(): pass"},
    ),
    "shell with another Python first": Way(command=f"{sys.executable} -c 1; {PYTEST}; true"),
    "pipe": Way(command=f"{PYTEST} | cat"),
}  # fmt: skip
REPEATED = """
import os
def test_flaky():
    if not os.path.exists("once"):
        os.makedirs("once")
        raise OSError
"""
KEPT = {
    "unittest: code of its own": (case("sys.exit(not run().wasSuccessful())"), 1),
    "unittest: a result that does not tell": (
        case(
            """
            class Result(unittest.TextTestResult):
                def stopTestRun(self): pass
            class Outer(unittest.TestCase):
                def test_result(self):
                    unittest.TestResult().startTestRun()
                    self.assertTrue(True)
            unittest.TextTestRunner(resultclass=Result).run(Outer("test_result"))
            """
        ),
        0,
    ),
    "unittest: repeated": (
        case("run()\nCase.test_wrong = lambda self: None\nrun()"),
        0,
    ),
    "unittest: expected failure": (
        case("Case.test_wrong = unittest.expectedFailure(Case.test_wrong)\nrun()"),
        0,
    ),
    "unittest: run within a test": (
        case(
            """
            class Outer(unittest.TestCase):
                def test_inner(self): self.assertFalse(run().wasSuccessful())
            run(Outer)
            """
        ),
        0,
    ),
    "code of its own": (main("sys.exit(run())"), 1),
    "repeated": (Way(textwrap.dedent(MAIN) + "run()\nrun()", {"test_one.py": REPEATED}), 0),
    "repeated after an error": (
        main("open('test_two.py', 'w').write('import absent')\nrun('test_two.py')\n"
             "open('test_two.py', 'w').write('def test_good(): pass')\nrun('test_two.py')"),
        0,
    ),
    "repeated by a shell": (
        Way(files={"test_one.py": REPEATED}, command=f"{PYTEST} || {PYTEST}"),
        0,
    ),
    "rerun": (
        Way("import pytest; pytest.main(['-q', '--reruns', '2'])", {"test_one.py": REPEATED}),
        0,
    ),
    "no tests": (Way("import pytest; pytest.main(['-q'])", {}), 0),
    "expected failure": (
        Way("import pytest; pytest.main(['-q'])",
            {"test_one.py": f"import pytest\n@pytest.mark.xfail\n{WRONG}"}),
        0,
    ),
    "pytester": (
        Way("import sys, pytest; sys.exit(pytest.main(['-q', '-p', 'pytester']))",
            {"test_one.py": """
                import pytest
                @pytest.mark.parametrize("how", ["inprocess", "subprocess"])
                def test_inner(pytester, how):
                    pytester.makepyfile("def test_wrong(): assert 0")
                    getattr(pytester, f"runpytest_{how}")().assert_outcomes(failed=1)
             """}),
        0,
    ),
    "child of a Python program": (
        Way(f"import subprocess\nassert subprocess.run({PYTEST.split()!r}).returncode == 1"),
        0,
    ),
}  # fmt: skip
QUICK = {"unittest: result not used", "os._exit at exit", "main without exit", "repeated"}


def ways(names: object) -> list[object]:
    return [
        pytest.param(
            one, marks=[] if one in QUICK or one.startswith("unittest") else [pytest.mark.slow]
        )
        for one in names  # type: ignore[attr-defined]
    ]


@pytest.mark.parametrize("name", ways(LOST))
def test_lost_outcome_is_a_finding(name: str, tmp_path: Path) -> None:
    report = LOST[name].run(tmp_path)
    (finding,) = report.findings
    assert (finding.id, report.returncode, report.exit_code) == ("failed-tests", 0, 120)
    assert LOST[name].says in finding.evidence, report


@pytest.mark.parametrize("name", ways(KEPT))
def test_outcome_that_is_not_lost_is_none(name: str, tmp_path: Path) -> None:
    """Tests that pass when they are repeated, and those of a nested session, do not count."""
    way, code = KEPT[name]
    report = way.run(tmp_path)
    assert (report.findings, report.returncode) == ((), code), f"{report}\n{report.stdout}"


def test_finding_names_the_tests_that_failed(tmp_path: Path) -> None:
    report = LOST["main without exit"].run(tmp_path)
    (finding,) = report.findings
    assert finding.summary == "test_one.py::test_wrong failed, but the exit code is 0"
    assert finding.test == "test_one.py::test_wrong"
