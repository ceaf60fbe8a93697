"""The distribution: what it imports, its types, and the pins of what development needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_utils
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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_constraints_pin_every_dependency() -> None:
    import tomllib

    def name(requirement: str) -> str:
        return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")

    with (ROOT / "pyproject.toml").open("rb") as file:
        pyproject = tomllib.load(file)
    extras = pyproject["project"]["optional-dependencies"]
    groups = (*extras.values(), *pyproject["dependency-groups"].values())
    wanted = {name(requirement) for group in groups for requirement in group}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert wanted - {name(line) for line in lines if "==" in line} == set()


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
