"""The pytest plugin: its marker and fixture in the usual kinds of sessions."""

import sys
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.clean_exit import CHECKER, run_command
from tests.support.programs import output_of

DIRTY = "import atexit; atexit.register(lambda: 1 / 0)"
# Each marked test starts an interpreter, where these two plugins take most of the time.
LIGHT = ["-p", "no:hypothesispytest", "-p", "no:anyio"]


@pytest.fixture
def outer(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeini(f"[pytest]\naddopts = --strict-markers {' '.join(LIGHT)}\n")
    return pytester


def run_below_the_command(outer: pytest.Pytester, *options: str) -> Any:
    command = [*CHECKER, "--", sys.executable, "-m", "pytest", *LIGHT, *options]
    return run_command(command, cwd=outer.path)


MARKED = """
import os, pytest, sys, threading

class Raises:
    def __del__(self): raise KeyError("lost")
@pytest.fixture
def number(): return 3
@pytest.mark.clean_exit(ignore=["ZeroDivision"])
@pytest.mark.parametrize("n", ["x::y"])
def test_parametrised(n, number, tmp_path):
    assert number == 3
    DIRTY

class TestInClass:
    @pytest.mark.clean_exit(resource_warnings=True)
    def test_open(self): sys.modules["keep"] = open(os.devnull)
    @pytest.mark.clean_exit
    def test_wrong(self):
        Raises()
        thread = threading.Thread(target=lambda: {}["x"])
        thread.start()
        thread.join()
        print("message to stdout")
        assert 1 == 2

@pytest.mark.clean_exit
@pytest.mark.skip(reason="never")
def test_skipped(): pass
def test_dirty_without_the_marker(): DIRTY
@pytest.mark.clean_exit
def test_gone(): os._exit(0)
@pytest.mark.clean_exit(tiemout_s=2)
def test_unknown(): raise SystemError
@pytest.mark.clean_exit(ignore="vendor")
def test_letters(): raise SystemError
"""


@pytest.mark.parametrize(
    "options", [[], pytest.param(["-n", "2", "-p", "no:cacheprovider"], marks=pytest.mark.slow)]
)
def test_marker_runs_the_test_in_a_fresh_interpreter(
    outer: pytest.Pytester, options: list[str]
) -> None:
    """With parameters, fixtures, classes, skips, failures and options of `check`."""
    outer.makepyfile(MARKED.replace("DIRTY", DIRTY))
    result = outer.runpytest_subprocess("-ra", *options)
    result.assert_outcomes(passed=2, failed=5, skipped=1)
    text = result.stdout.str()
    for message in (
        "the interpreter of this test did not exit cleanly",
        "resource-warning: ",
        "the interpreter of this test ended before the test did",
        "assert 1 == 2",
        "message to stdout",
        "unraisable: KeyError: 'lost'",
        "thread-error: KeyError: 'x'",
        "the marker clean_exit has no option 'tiemout_s'; the options are children, ignore, "
        "max_shutdown_s, resource_warnings, timeout_s",
        "the marker clean_exit: ignore must be a list, got a string; pass ignore=['vendor']",
    ):
        assert message in text, text
    assert "SystemError" not in text
    assert text.index("unraisable: ") < text.index("Traceback (most recent call last)")


@pytest.mark.slow
def test_plugins_of_pytest_turn_errors_of_a_suite_into_warnings(outer: pytest.Pytester) -> None:
    outer.makepyfile("class A:\n    def __del__(self): 1 / 0\ndef test_it(): A()\n")
    for options, code in (["-p", "unraisableexception"], 0), ([], 120):
        done = run_below_the_command(outer, *options)
        assert done.returncode == code
        assert ("PytestUnraisableExceptionWarning" in done.stdout) == (code == 0)


UNFINISHED = """
import os
def test_first(): pass
def test_second(): ENDS
def test_third(): pass
"""


@pytest.mark.parametrize(
    ("ends", "code"),
    [("os._exit(0)", 120), pytest.param("os.fork() or os._exit(0)", 0, marks=pytest.mark.slow)],
)
def test_session_that_a_test_ends_counts(outer: pytest.Pytester, ends: str, code: int) -> None:
    outer.makepyfile(UNFINISHED.replace("ENDS", ends))
    done = run_below_the_command(outer)
    assert done.returncode == code, done.stderr
    assert ("unfinished-tests: " in done.stderr) == (code != 0)
    assert ("::test_second" in done.stderr) == (code != 0)


def test_fixture_takes_files_lists_and_strings_and_fails_with_the_evidence(
    outer: pytest.Pytester,
) -> None:
    outer.makepyfile(
        program="print('hello')",
        dirty="import atexit\natexit.register(lambda: 1 / 0)\n",
        test_it="""
        import sys

        def test_clean(clean_exit):
            assert clean_exit("program.py").stdout == "hello\\n"
            assert clean_exit(f"{sys.executable} program.py", timeout_s=30).clean
            assert clean_exit(["-c", "raise SystemExit(3)"], returncode=3).returncode == 3

        def test_dirty(clean_exit): clean_exit("dirty.py")
        def test_code(clean_exit): clean_exit(["-c", "print('why'); raise SystemExit(3)"])
        """,
    )
    result = outer.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*atexit-error: ZeroDivisionError*", "*Traceback*", "*expected to exit with 0*", "*why*"]
    )


IMPORTS = """
import pytest, sys
before = set(sys.modules)
import clean_exit.pytest_plugin
loaded = set(sys.modules) - before
print(*{name.partition(".")[0] for name in loaded} - sys.stdlib_module_names)
print(*{"asyncio", "multiprocessing", "socket", "unittest"} & loaded)
"""


def test_plugin_imports_only_light_modules() -> None:
    assert output_of(IMPORTS) == "clean_exit\n\n"


CONFTEST = """
import enum, pytest
Device = enum.Enum("Device", "cpu cuda")

def pytest_addoption(parser):
    parser.addoption("--runslow", action="store_true")
    parser.addoption("--dev", type=Device.__getitem__, default=Device.cpu)

def pytest_configure(config): config.addinivalue_line("markers", "slow: x")
def pytest_runtest_setup(item):
    if "slow" in item.keywords and not item.config.getoption("--runslow"):
        pytest.skip("needs --runslow")
"""
SESSION = """
import logging, os, pytest
from pathlib import Path
pytestmark = pytest.mark.xdist_group("a group")

@pytest.fixture(autouse=True)
def note():
    with Path("pids").open("a") as file: file.write(f"{os.getpid()}\\n")
def test_before(tmp_path):
    (tmp_path / "kept").touch()
    logging.error("before")

@pytest.mark.clean_exit
@pytest.mark.slow
def test_options(request, tmp_path):
    assert request.config.getoption("--dev").name == "cuda"
    assert "CLEAN_EXIT_PYTEST" not in os.environ

def test_fixtures_of_a_marked_test_run_only_in_the_inner_pytest():
    first, marked, last = map(int, Path("pids").read_text().split())
    assert first == last == os.getpid() != marked
"""


@pytest.mark.parametrize(
    "workers", [[], pytest.param(["-n", "1", "--dist", "loadgroup"], marks=pytest.mark.slow)]
)
def test_inner_pytest_has_the_options_of_the_session_and_leaves_its_files_alone(
    outer: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: list[str]
) -> None:
    outer.makeconftest(CONFTEST)
    outer.makepyfile(test_session=SESSION, test_other="raise SystemError('do not collect')")
    ini = f"[pytest]\naddopts = . {' '.join(LIGHT)} --maxfail=7 --strict-config --dev cuda\n"
    outer.makeini(f"{ini}cache_dir = .cache_of_mine\nxfail_strict = true\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q -v -v")
    reports = ["--basetemp=folder", "--log-file=log", "--junitxml=j.xml", "--lf", "--cache-clear"]
    options = ["--runslow", "--ignore=test_other.py", "-k", "session", *reports, *workers]
    outer.runpytest_subprocess(*options).assert_outcomes(passed=3)
    assert list(outer.path.glob("folder/**/kept"))
    assert workers or "before" in (outer.path / "log").read_text()
    assert ElementTree.parse(outer.path / "j.xml").getroot()[0].get("tests") == "3"


@pytest.mark.slow
def test_last_failed_selects_a_marked_test(outer: pytest.Pytester) -> None:
    outer.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.clean_exit
        def test_one(): pass
        def test_two(): assert 0
        """
    )
    outer.runpytest_subprocess().assert_outcomes(passed=1, failed=1)
    outer.runpytest_subprocess("--lf").assert_outcomes(failed=1)


@pytest.mark.slow
def test_expected_and_unexpected_failures_keep_their_meaning(outer: pytest.Pytester) -> None:
    outer.makepyfile(
        f"""
        import pytest, unittest
        pytestmark = pytest.mark.clean_exit

        @pytest.mark.xfail(strict=True)
        def test_strict(): {DIRTY}
        @pytest.mark.xfail(strict=True, raises=KeyError)
        def test_other_error(): {DIRTY}
        def test_skip(): pytest.skip("here")
        def test_exit_code():
            import atexit, os
            atexit.register(os._exit, 3)

        @pytest.mark.xfail(strict=True)
        def test_clean(): pass
        class TestOld(unittest.TestCase):
            def test_numbers(self):
                with self.subTest(n=1): assert False
                with self.subTest(n=2): assert True
        """
    )
    result = outer.runpytest_subprocess("-rA")
    result.assert_outcomes(xfailed=1, skipped=1, failed=4)
    result.stdout.fnmatch_lines_random(["FAILED *test_other_error*", "FAILED *test_clean*"])


@pytest.mark.slow
def test_reruns_start_another_interpreter(outer: pytest.Pytester) -> None:
    outer.makepyfile(
        f"""
        import pytest
        from pathlib import Path

        @pytest.mark.clean_exit
        def test_third_time():
            with Path("runs").open("a") as file: count = file.tell() + file.write("x")
            if count == 1:
                {DIRTY}
            assert count != 2
        """
    )
    assert "1 passed, 2 rerun" in outer.runpytest_subprocess("--reruns", "2").stdout.str()
    assert (outer.path / "runs").read_text() == "xxx"


@pytest.mark.slow
def test_coverage_has_the_lines_of_marked_tests(outer: pytest.Pytester) -> None:
    """With the setting of coverage that measures child processes."""
    pytest.importorskip("pytest_cov", minversion="7", reason="needs pytest-cov 7")
    outer.makepyfile(
        measured="def f():\n    return 1\n\ndef g():\n    return 2\n",
        test_it="""
        import measured, pytest
        def test_here(): measured.f()
        @pytest.mark.clean_exit
        def test_there(): measured.g()
        """,
    )
    outer.path.joinpath(".coveragerc").write_text("[run]\npatch = subprocess\nsource = .\n")
    outer.makeini("[pytest]\naddopts = --cov --cov-report=term --cov-fail-under=100\n")
    result = outer.runpytest_subprocess()
    result.assert_outcomes(passed=2)
    assert (result.ret, result.stdout.str().count("TOTAL")) == (0, 1)


@pytest.mark.slow
def test_pyproject_settings_apply_to_marker_and_fixture(outer: pytest.Pytester) -> None:
    settings = outer.path / "pyproject.toml"
    settings.write_text("[ tool . 'clean-exit' ]\nignore = ['ZeroDivision']\n")
    outer.makepyfile(
        f"""
        import pytest

        @pytest.mark.clean_exit
        def test_ignored(): {DIRTY}
        def test_fixture(clean_exit): clean_exit(["-c", {DIRTY!r}])
        """
    )
    outer.runpytest_subprocess().assert_outcomes(passed=2)
    settings.write_text("[tool.clean-exit]\ntimeout = 'soon'\n")
    result = outer.runpytest_subprocess()
    result.assert_outcomes(failed=2)
    message = "[[]tool.clean-exit[]] argument --timeout: must be more than 0 seconds, got 'soon'"
    result.stdout.fnmatch_lines([f"*pyproject.toml: {message}*"])
