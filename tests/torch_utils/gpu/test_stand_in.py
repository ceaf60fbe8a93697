"""The skipped tests, the controls and the stored result of the stand-in."""

from __future__ import annotations

import json

from tests.support.programs import ROOT
from tests.torch_utils.gpu import plain
from tests.torch_utils.gpu.stand_in import run as runner
from tests.torch_utils.gpu.stand_in.controls import CONTROLS
from tests.torch_utils.gpu.stand_in.device import SKIPPED

RESULT = ROOT / "benchmarks" / "results" / f"{runner.RESULT}.json"


def test_skipped_and_controlled_tests_exist() -> None:
    """No control uses a skipped test."""
    names = {name for name, _ in plain.tests()}
    files = {name.partition("::")[0] for name in names}
    controlled = {control.test for control in CONTROLS.values()}
    assert set(SKIPPED) <= names | files and controlled <= names - set(SKIPPED)


def test_result_lists_every_test_and_control() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert {name for name, _ in plain.tests()} <= set(result["tests"])
    assert set(result["controls"]) == set(CONTROLS)
    outcomes = {test["outcome"] for test in result["tests"].values()}
    assert outcomes == {"passed", "skipped"}
    assert all(control["as_expected"] for control in result["controls"].values())
