"""The distribution: what it imports, its types, and the pins of what development needs."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

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


def test_another_torch_utils_ends_the_command_in_one_line(tmp_path: Path) -> None:
    """Other projects have a folder of this name, which the current directory puts in front."""
    for content, error in (("raise OSError('another project')", "another project"), ("", HIDES)):
        done = beside_another(tmp_path, "rag_demo", "--help", content=content)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith("rag-demo: error: ") and error in done.stderr
    assert str(tmp_path) in done.stderr
    done = beside_another(
        tmp_path, "timeit", "-n1", "-r1", "import rag_demo; rag_demo.EmbeddingModel"
    )
    assert f"ModuleNotFoundError: EmbeddingModel needs torch_utils; {tmp_path}" in done.stderr


HIDES = "hides the torch_utils of torch-cleanup"


def beside_another(folder: Path, *command: str, content: str = "") -> Any:
    """Run a module of Python in a folder that has a package torch_utils of its own."""
    (folder / "torch_utils").mkdir(exist_ok=True)
    (folder / "torch_utils" / "__init__.py").write_text(content)
    environment = {**os.environ, "PYTHONPATH": IMPORT_PATH}
    run_it = [sys.executable, "-m", *command]
    return subprocess.run(
        run_it, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_pytest_runs_beside_another_torch_utils(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass")
    options = ("-p", "torch_cleanup_pytest", "-p", "no:torch_utils", "-p", "no:cacheprovider")
    done = beside_another(tmp_path, "pytest", *options)
    assert "1 passed" in done.stdout, done.stderr
    assert f"no plugin, because {tmp_path / 'torch_utils'}" in done.stdout
    found = metadata.distribution("torch-cleanup").entry_points.select(name="torch_utils")
    assert [each.value for each in found] == ["torch_cleanup_pytest"], "install it again"


def test_module_prints_what_a_bug_report_needs(tmp_path: Path) -> None:
    """Also who else has its name, here a folder at the end of the path."""
    other = tmp_path / "torch_utils"
    other.mkdir()
    (other / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "torch_utils"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert lines["torch-cleanup"] == f"{torch_utils.__version__} in {ROOT / 'torch_utils'}"
    assert f"torch_utils is also: the folder {other}" in done.stdout
    assert "MALLOC_ARENA_MAX=2" in lines["settings"]
    assert {"python", "system", "torch", "built for", "device"} <= set(lines)
