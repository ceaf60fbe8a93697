"""The flake8 plugin."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flake8")

DIRTY = """class A:
    def __del__(self):
        'ä'; import os
        import re  # noqa: CEX001
        os.wait()
"""
CONFIG = """[flake8]
enable-extensions = CEX
select = CEX
"""


def flake8(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "flake8", *options, "dirty.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stderr == "", done.stderr
    return done.stdout


def test_flake8_reports_the_rules_and_applies_noqa(tmp_path: Path) -> None:
    """Beside another package named torch_utils."""
    (tmp_path / "torch_utils").mkdir()
    (tmp_path / "torch_utils" / "__init__.py").write_text("raise RuntimeError('another one')\n")
    (tmp_path / "dirty.py").write_text(DIRTY, encoding="utf-8")
    (tmp_path / ".flake8").write_text(CONFIG)
    message = flake8(tmp_path)
    assert message.splitlines() == [
        "dirty.py:3:14: CEX001 import: __del__: import os",
        "dirty.py:5:9: CEX004 blocking-call: __del__: os.wait() has no timeout",
    ]
    assert "CEX004" not in flake8(tmp_path, "--extend-ignore", "CEX004")
