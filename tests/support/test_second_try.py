"""A flaky test is listed and does not fail the run; all else that fails does."""

from __future__ import annotations

import pytest

from support.zygotes import IMPORT_PATH

FLAKY = """
from pathlib import Path
def test_flaky():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        assert False
def test_fine(): pass
"""


@pytest.fixture
def flaky_tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source: str, *options: str) -> tuple[pytest.RunResult, str]:
        pytester.makepyfile(source)
        file = pytester.path / "flaky.txt"
        options = ("-p", "xdist", "-p", "support.second_try", "--second-try", str(file), *options)
        result = pytester.runpytest_subprocess(*options)
        return result, file.read_text() if file.exists() else ""

    return run


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_flaky_test_is_listed_and_passes(flaky_tests, workers: tuple[str, ...]) -> None:
    result, listed = flaky_tests(FLAKY, *workers)
    assert result.ret == 0
    assert listed.splitlines() == ["test_flaky_test_is_listed_and_passes.py::test_flaky"]
    result.stdout.fnmatch_lines(["*flaky: failed, then passed by itself*", listed.strip()])


@pytest.mark.slow
def test_test_that_fails_twice_fails_the_run(flaky_tests) -> None:
    result, listed = flaky_tests(FLAKY + "\ndef test_broken(): assert False\n")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert listed.endswith("::test_flaky\n")


@pytest.mark.slow
def test_run_that_broke_off_gets_no_second_try(flaky_tests) -> None:
    result, listed = flaky_tests("import nothing_like_it\n" + FLAKY)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert listed == ""
    result, listed = flaky_tests(FLAKY + "\ndef test_broken(): assert False\n", "-x")
    assert (result.ret, listed) == (pytest.ExitCode.TESTS_FAILED, "")
    result, _ = flaky_tests(FLAKY, "-k", "no_such_test")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.slow
def test_without_the_option_one_failure_fails_the_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FLAKY)
    assert pytester.runpytest_subprocess().ret == pytest.ExitCode.TESTS_FAILED


CRASH = """
import os
from pathlib import Path
def test_crashes():
    seen = Path("seen")
    if seen.exists():
        os._exit(0)
    seen.touch()
    assert False
def test_fine(): pass
"""
SKIP = CRASH.replace("os._exit(0)", "__import__('pytest').skip('no reason')")
GROUP = "import pytest\n" + FLAKY.replace(
    "def test_flaky", "@pytest.mark.xdist_group('g')\ndef test_flaky"
)


@pytest.mark.slow
@pytest.mark.parametrize("source", [CRASH, SKIP], ids=["crash", "skip"])
def test_second_try_that_does_not_pass_fails_the_run(flaky_tests, source: str) -> None:
    result, listed = flaky_tests(source)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert listed == ""


@pytest.mark.slow
def test_flaky_test_of_a_group_is_found(flaky_tests) -> None:
    result, listed = flaky_tests(GROUP, "-n", "2", "--dist", "loadgroup")
    assert result.ret == 0
    assert "::test_flaky@g" in listed


@pytest.mark.slow
def test_worker_that_dies_after_its_last_test_fails_the_run(
    flaky_tests, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest("""
        import os
        def pytest_sessionfinish(session):
            if hasattr(session.config, "workerinput"):
                os._exit(1)
    """)
    result, _ = flaky_tests("def test_fine(): pass", "-n", "1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines("a worker died, and no test explains it")


@pytest.mark.slow
def test_run_with_too_few_tests_fails(flaky_tests) -> None:
    result, _ = flaky_tests("def test_fine(): pass", "--at-least", "2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines("1 tests passed, fewer than 2")
    result, _ = flaky_tests("def test_fine(): pass", "--at-least", "1")
    assert result.ret == 0
