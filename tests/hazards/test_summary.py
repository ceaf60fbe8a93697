"""The table of the matrix, and its control: it has to fail where no naive destructor fell short.

Run as sessions of their own, with and without xdist: its controller collects nothing.
"""

from __future__ import annotations

import pytest

from hazards.summary import CONTROL_SIZE, control_failed
from programs import ROOT

SESSION = """
    import pytest

    @pytest.mark.parametrize("n", range({size}))
    def test_row(n, record_property):
        record_property("hazard", ("naive", "this Python", n >= {short}))
"""
OPTIONS = [
    pytest.param((), id="alone"),
    pytest.param(("-n", "2"), id="xdist", marks=pytest.mark.slow),
]


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests'}")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\naddopts = -p hazards.summary -p xdist -p no:cacheprovider\n")
    return pytester


@pytest.mark.parametrize("options", OPTIONS)
def test_session_whose_control_failed_fails(
    session: pytest.Pytester, options: tuple[str, ...]
) -> None:
    """All programs passed, and still the exit code is that of failed tests."""
    session.makepyfile(SESSION.format(size=CONTROL_SIZE + 1, short=0))
    result = session.runpytest_subprocess(*options)
    result.assert_outcomes(passed=CONTROL_SIZE + 1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines("no naive destructor fell short; the control has failed")


@pytest.mark.parametrize("options", OPTIONS)
def test_session_whose_control_holds_passes(
    session: pytest.Pytester, options: tuple[str, ...]
) -> None:
    """The table says how many fell short."""
    session.makepyfile(SESSION.format(size=CONTROL_SIZE + 1, short=2))
    result = session.runpytest_subprocess(*options)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(f"naive * this Python * {CONTROL_SIZE + 1} programs, 2 fall short")


def test_few_programs_prove_nothing() -> None:
    """One row that is run by hand is no failed control; ours are never the control."""
    fine = [True] * (CONTROL_SIZE + 1)
    assert control_failed({("naive", "3.10"): fine})
    assert not control_failed({("naive", "3.10"): fine[:1]})
    assert not control_failed({("resource", "3.10"): fine})
