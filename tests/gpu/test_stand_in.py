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
