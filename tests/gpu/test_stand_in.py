"""The skipped tests, the controls and the stored result of the stand-in."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpu import plain
from gpu.stand_in import run as runner
from gpu.stand_in.controls import CONTROLS
from gpu.stand_in.device import SKIPPED
from support.programs import ROOT

RESULT = ROOT / "benchmarks" / "results" / f"{runner.RESULT}.json"


def test_skipped_and_controlled_tests_exist() -> None:
    """No control uses a skipped test."""
    names = {name for name, _ in plain.tests()}
    controlled = {control.test for control in CONTROLS.values()}
    assert set(SKIPPED) <= names and controlled <= names - set(SKIPPED)


def test_result_lists_every_test_and_control() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert set(result["tests"]) == {name for name, _ in plain.tests()}
    assert set(result["controls"]) == set(CONTROLS)
    skipped = {n: t["reason"] for n, t in result["tests"].items() if t["outcome"] == "skipped"}
    assert skipped == SKIPPED


def test_summary_names_failures() -> None:
    result = {
        "tests": {
            "a": {"outcome": "passed", "reason": ""},
            "b": {"outcome": "failed", "reason": "why"},
            "c": {"outcome": "skipped", "reason": "no"},
        },
        "controls": {"x": {"as_expected": True}, "y": {"as_expected": False}},
    }
    assert runner.summarise(result) == [
        "failed: b: why",
        "did not fail: y",
        "1 passed, 1 failed, 1 skipped; 1 of 2 controls have failed, as they must",
    ]


@pytest.mark.parametrize(
    ("outcome", "reason", "as_expected"),
    [
        ("failed", "AssertionError: so many bytes", True),
        ("failed", "AssertionError: something else", False),
        ("started", "so many bytes", False),
        ("passed", "", False),
        ("skipped", "so many bytes", False),
    ],
)
def test_control_must_fail_with_its_message(outcome: str, reason: str, as_expected: bool) -> None:
    """A crash or another failure does not count."""
    found = runner.judge("test", "so many bytes", {"outcome": outcome, "reason": reason})
    assert found["as_expected"] is as_expected


def test_controls_replace_existing_torch_functions() -> None:
    """A control that replaced a missing function would change nothing."""
    torch = pytest.importorskip("torch")
    places = {
        (torch.cuda, "is_current_stream_capturing"),
        (torch.cuda, "empty_cache"),
        (vars(torch)["_C"], "_cuda_clearCublasWorkspaces"),  # Only a torch for CUDA has it.
    }
    before = {place: getattr(*place, None) for place in places}
    try:
        for control in CONTROLS.values():
            control.breaks()
        assert {place for place in places if getattr(*place) is before[place]} == set()
    finally:
        for (owner, name), value in before.items():
            delattr(owner, name) if value is None else setattr(owner, name, value)
    assert all(before[place] is not None for place in places if place[0] is torch.cuda)


def test_stand_in_sources_compile() -> None:
    """The headers come with torch for CUDA."""
    packages = runner.packages_of(Path(sys.prefix))
    if shutil.which("g++") is None or packages is None or not runner.headers(packages):
        pytest.skip("needs g++ and the headers that come with torch for CUDA")
    include = [word for path in runner.headers(packages) for word in ("-isystem", str(path))]
    sources = map(str, sorted(runner.SOURCES.glob("*.cpp")))
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, *include, *sources], check=True)


def test_runner_reports_a_missing_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does so before it downloads gigabytes."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert runner.main() == 1
    assert "needs a C++ compiler" in capsys.readouterr().out
