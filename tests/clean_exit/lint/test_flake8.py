"""The flake8 plugin."""

import sys
from pathlib import Path

import pytest

from tests.support.clean_exit import run_command

pytest.importorskip("flake8")

DIRTY = """class A:
    def __del__(self):
        'ä'; import os
        import re  # noqa: CEX001
        os.wait()
"""
CONFIG = "[flake8]\nenable-extensions = CEX\nselect = CEX\n"


def test_flake8_reports_the_rules_and_applies_noqa(tmp_path: Path) -> None:
    """Beside another package named torch_utils."""
    (tmp_path / "torch_utils").mkdir()
    (tmp_path / "torch_utils" / "__init__.py").write_text("raise RuntimeError('another one')\n")
    (tmp_path / "dirty.py").write_text(DIRTY, encoding="utf-8")
    (tmp_path / ".flake8").write_text(CONFIG)
    done = run_command([sys.executable, "-m", "flake8", "dirty.py"], cwd=tmp_path, env=None)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "dirty.py:3:14: CEX001 import: __del__: import os",
        "dirty.py:5:9: CEX004 blocking-call: __del__: os.wait() has no timeout",
    ]
