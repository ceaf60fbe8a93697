"""The distribution: what it imports, its types, and the pins of what development needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.programs import IMPORT_PATH, ROOT, assert_clean, run

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.append(sys.argv[1])
import torch_utils
adapters = {"prometheus", "__main__"}
names = [
    found.name
    for found in pkgutil.walk_packages(torch_utils.__path__, "torch_utils.")
    if found.name.rpartition(".")[2] not in adapters
]
for name in names:
    importlib.import_module(name)
assert len(names) > 20, names
"""


def test_torch_utils_imports_the_standard_library_only() -> None:
    """Each of its modules, in an interpreter without any installed package."""
    assert_clean(run(IMPORT_ALL, str(ROOT), options=("-I", "-S")))
    control = run("import pytest", options=("-I", "-S"))
    assert "No module named 'pytest'" in control.stderr


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
