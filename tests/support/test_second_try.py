"""A flaky test is listed and does not fail the run; all else that fails does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.zygotes import IMPORT_PATH

pytestmark = pytest.mark.slow
FLAKY = """
import pytest
from pathlib import Path
@pytest.mark.xdist_group("g")
def test_flaky():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        assert False
    {second}
def test_fine(): pass
"""
BROKEN = "def test_broken(): assert False\n"
Run = Callable[..., tuple[pytest.RunResult, str]]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTHONPATH", IMPORT_PATH)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source: str, *options: str) -> tuple[pytest.RunResult, str]:
        pytester.makepyfile(test_case=source.replace("{second}", "pass"))
        file = pytester.path / "flaky.txt"
        options = (
            "-p",
            "xdist",
            "-p",
            "tests.support.second_try",
            "--second-try",
            str(file),
            *options,
        )
        result = pytester.runpytest_subprocess(*options)
        return result, file.read_text() if file.exists() else ""

    return run


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadgroup")])
def test_flaky_test_is_listed_and_passes(run: Run, workers: tuple[str, ...]) -> None:
    result, listed = run(FLAKY, *workers)
    assert result.ret == 0
    assert listed.splitlines() == ["test_case.py::test_flaky" + "@g" * bool(workers)]
    result.stdout.fnmatch_lines(["*flaky: failed, then passed by itself*", listed.strip()])


@pytest.mark.parametrize("second", ["assert False", "pytest.skip('no reason')", "exit(0)"])
def test_second_try_that_does_not_pass_fails_the_run(run: Run, second: str) -> None:
    result, listed = run(FLAKY.replace("{second}", second))
    assert (result.ret, listed) == (pytest.ExitCode.TESTS_FAILED, "")


def test_run_that_broke_off_gets_no_second_try(run: Run) -> None:
    result, listed = run("import nothing_like_it\n" + FLAKY)
    assert (result.ret, listed) == (pytest.ExitCode.INTERRUPTED, "")
    result, listed = run(FLAKY + BROKEN, "-x")
    assert (result.ret, listed) == (pytest.ExitCode.TESTS_FAILED, "")


def test_worker_that_dies_after_its_last_test_fails_the_run(
    run: Run, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest("""
        import os
        def pytest_sessionfinish(session):
            if hasattr(session.config, "workerinput"):
                os._exit(1)
    """)
    result, _ = run("def test_fine(): pass", "-n", "1")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines("a worker died, and no test explains it")


@pytest.mark.parametrize(("at_least", "code"), [("2", 1), ("1", 0)])
def test_run_with_too_few_tests_fails(run: Run, at_least: str, code: int) -> None:
    result, _ = run("def test_fine(): pass", "--at-least", at_least)
    assert result.ret == code
