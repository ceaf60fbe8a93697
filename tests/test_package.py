"""Imports of the package are typed and tell others apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import torch_utils
from tests.support.programs import IMPORT_PATH, ROOT


def test_another_torch_utils_ends_the_command_in_one_line(tmp_path: Path) -> None:
    """Other projects have a folder of this name, which the current directory puts in front."""
    (tmp_path / "torch_utils").mkdir()
    (tmp_path / "torch_utils" / "__init__.py").write_text("raise OSError('another project')")
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    done = subprocess.run(
        [sys.executable, "-m", "rag_demo", "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip() == "rag-demo: error: another project"


@pytest.mark.slow
def test_type_checker_reports_misspelt_import(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="the dependency group dev is not installed")
    path = tmp_path / "program.py"
    path.write_text(
        f"from torch_utils import {', '.join(torch_utils.__all__)}\n"
        "from torch_utils import relase\n"
        "safe_cuda_empty_cache() + 'bool'\n"
        "release(_down=1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if ": error: " in line]
    errors = [line.partition(": ")[0].rpartition(":")[2] for line in found]
    assert errors == ["2", "3", "4"], done.stdout
    for wanted in ('no attribute "relase"', '"bool"', 'argument "_down"'):
        assert wanted in done.stdout, done.stdout
