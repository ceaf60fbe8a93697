"""The skipped tests, the controls and the stored result of the stand-in."""

from __future__ import annotations

import json

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
