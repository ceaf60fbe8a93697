"""The pytest marker and fixture."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

MARKED = """
    import pytest

    @pytest.fixture
    def number(): return 3

    @pytest.mark.clean_exit
    @pytest.mark.parametrize("n", [1, "a b", "x::y"])
    def test_parametrised(n, number, tmp_path):
        assert number == 3

    @pytest.mark.clean_exit
    class TestInClass:
        def test_dirty(self):
            import atexit
            atexit.register(lambda: 1 / 0)

        def test_wrong(self):
            assert 1 == 2

    @pytest.mark.clean_exit
    def test_skipped():
        pytest.skip("not today")

    @pytest.mark.clean_exit
    @pytest.mark.xfail(strict=True, reason="it fails, and the marker lets it")
    def test_expected_failure():
        assert False

    @pytest.mark.clean_exit
    def test_gone():
        import os
        os._exit(0)
"""

# Each test of these is an interpreter of its own, and these two cost more than all the rest.
LIGHT = ["-p", "no:hypothesispytest", "-p", "no:anyio"]


@pytest.fixture
def outer(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("CLEAN_EXIT_PYTEST_REPORTS", raising=False)
    pytester.makeini(f"[pytest]\naddopts = --strict-markers {' '.join(LIGHT)}\n")
    return pytester


def run(outer: pytest.Pytester, *options: str) -> Any:
    return outer.runpytest_subprocess(*options)


@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["-n", "2"], marks=pytest.mark.slow),
        pytest.param(["-p", "no:cacheprovider"], marks=pytest.mark.slow),
        pytest.param(["-p", "no:xdist"], marks=pytest.mark.slow),
        pytest.param(["-x", "-v"], marks=pytest.mark.slow),
    ],
)
def test_marker(outer: pytest.Pytester, options: list[str]) -> None:
    """With parameters, fixtures and classes; skips, failures and lost interpreters."""
    outer.makepyfile(MARKED)
    result = run(outer, *options)
    if "-x" in options:
        result.assert_outcomes(passed=3, failed=1)
        return
    result.assert_outcomes(passed=3, failed=3, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*atexit-error: ZeroDivisionError: division by zero*",
            "*the interpreter of this test did not leave cleanly*",
            "*the interpreter of this test ended before the test did*",
            "*assert 1 == 2*",
        ]
    )
    text = result.stdout.str()
    assert text.index("atexit-error: ") < text.index("Traceback (most recent call last)")


def test_control_without_the_marker(outer: pytest.Pytester) -> None:
    """The same dirty test passes."""
    outer.makepyfile("def test_dirty():\n    import atexit\n    atexit.register(lambda: 1 / 0)\n")
    run(outer).assert_outcomes(passed=1)


def test_nothing_is_set_up_here(outer: pytest.Pytester) -> None:
    """Fixtures and the test run in the fresh interpreter only."""
    outer.makepyfile(
        """
        import os, pytest
        from pathlib import Path

        @pytest.fixture(autouse=True)
        def note():
            with Path("pids").open("a") as file: file.write(f"{os.getpid()}\\n")

        @pytest.mark.clean_exit
        def test_one(): pass

        def test_two():
            pids = Path("pids").read_text().split()
            assert len(pids) == 2 and pids[0] != pids[1] and int(pids[1]) == os.getpid()
        """
    )
    run(outer).assert_outcomes(passed=2)


def test_options_of_the_marker(outer: pytest.Pytester) -> None:
    """They are those of check; wrong ones are said."""
    outer.makepyfile(
        """
        import pytest

        @pytest.mark.clean_exit(ignore=["ZeroDivision"])
        def test_ignored():
            import atexit
            atexit.register(lambda: 1 / 0)

        @pytest.mark.clean_exit(tiemout_s=2)
        def test_wrong(): pass
        """
    )
    result = run(outer)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*it has no option tiemout_s; it has timeout_s, *"])


@pytest.mark.slow
def test_hang_is_ended(outer: pytest.Pytester) -> None:
    """After the time that the marker allows, of which a busy machine needs much for pytest."""
    outer.makepyfile(
        """
        import pytest, time

        @pytest.mark.clean_exit(timeout_s=25)
        def test_hang(): time.sleep(600)
        """
    )
    result = run(outer)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*hang: it did not end within 25 s*"])
    assert "in test_hang" in result.stdout.str()


def test_settings_are_passed_on(outer: pytest.Pytester) -> None:
    """Warnings, ini options and plug-ins from the command line hold in there too."""
    outer.makepyfile(
        my_plugin="import pytest\n@pytest.fixture\ndef mine(): return 7\n",
        test_it="""
        import pytest, warnings

        @pytest.mark.clean_exit
        def test_fixture_of_plugin(mine): assert mine == 7

        @pytest.mark.clean_exit
        def test_warning(): warnings.warn("x", UserWarning)
        """,
    )
    outer.syspathinsert()
    result = run(outer, "-p", "my_plugin", "-W", "error", "-k", "test_", "-m", "clean_exit")
    result.assert_outcomes(passed=1, failed=1)


def test_fixture(outer: pytest.Pytester) -> None:
    """Fails with the evidence; takes files, lists and strings."""
    outer.makepyfile(
        program="print('hello')",
        dirty="import atexit\natexit.register(lambda: 1 / 0)\n",
        test_it="""
        import sys

        def test_clean(clean_exit):
            assert clean_exit("program.py").stdout == "hello\\n"
            assert clean_exit([sys.executable, "program.py"]).clean
            assert clean_exit(f"{sys.executable} program.py", timeout_s=30).clean
            assert clean_exit(["-c", "raise SystemExit(3)"], returncode=3).returncode == 3

        def test_dirty(clean_exit): clean_exit("dirty.py")

        def test_code(clean_exit): clean_exit(["-c", "print('why'); raise SystemExit(3)"])
        """,
    )
    result = run(outer)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        ["*atexit-error: ZeroDivisionError*", "*Traceback*", "*expected to exit with 0*", "*why*"]
    )


def test_described() -> None:
    """pytest itself says what there is."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *LIGHT]
    markers = subprocess.run([*command, "--markers"], capture_output=True, text=True, check=True)
    assert "@pytest.mark.clean_exit(timeout_s=300" in markers.stdout
    options = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "--clean-exit-timeout=S" in options.stdout


def test_cost_of_the_import() -> None:
    """Of what is not loaded yet: itself and the standard library, and of that nothing of weight."""
    program = """
import pytest, sys, json
before = set(sys.modules)
import _torch_cleanup.pytest_plugin
print(*sorted(set(sys.modules) - before))
"""
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert "_torch_cleanup.pytest_plugin" in loaded
    assert "torch_utils" not in loaded  # which may be the project's own
    assert not any("clean_exit" in name for name in loaded)
    own = {"_torch_cleanup", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in loaded} <= own
    assert not {"asyncio", "multiprocessing", "socket", "unittest"} & set(loaded)


def test_wrong_options_of_the_marker(outer: pytest.Pytester) -> None:
    """One line each, which says what there is; nothing has run."""
    outer.makepyfile("""
        import pytest

        @pytest.mark.clean_exit(5)
        def test_unnamed(): pass

        @pytest.mark.clean_exit(ignore="vendor")
        def test_letters(): pass
    """)
    result = run(outer)
    result.assert_outcomes(failed=2)
    for said in (
        "it takes options by name only",
        "ignore takes a list of regular expressions: ignore=['vendor']",
    ):
        assert f"the marker clean_exit: {said}" in result.outlines
