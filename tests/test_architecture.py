"""The rules of docs/architecture.md: those that no linter checks, and that the checks can fail."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import ROOT, assert_clean, run

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
MOST_PRIVATE_TESTS = 15

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.append(sys.argv[1])
import torch_utils
adapters = {"pytest_plugin", "prometheus", "fresh_pytest", "__main__", "keeper"}
names = [
    found.name
    for found in pkgutil.walk_packages(torch_utils.__path__, "torch_utils.")
    if found.name.rpartition(".")[2] not in adapters and "_startup" not in found.name
]
for name in names:
    importlib.import_module(name)
assert len(names) > 30, names
"""


def test_torch_utils_imports_the_standard_library_only() -> None:
    """Each of its modules, in an interpreter without any installed package."""
    result = run(IMPORT_ALL, str(ROOT), options=("-I", "-S"))
    assert_clean(result)


def test_foreign_import_would_fail_there() -> None:
    result = run("import pytest", options=("-I", "-S"))
    assert "No module named 'pytest'" in result.stderr


def test_rooms_of_the_page_exist() -> None:
    """What the picture of torch_utils names is there."""
    picture = PAGE.partition("```text\n")[2].partition("rag_demo/ ")[0]
    rooms = re.findall(r"[\w/]+\.py|_?\w+/(?= )", picture)
    assert len(rooms) > 15
    for room in set(rooms) - {"torch_utils/"}:
        assert (ROOT / "torch_utils" / room).exists(), room


BROKEN = {
    "torch_utils does not know rag_demo": ("torch_utils/devices.py", "import rag_demo"),
    "the exit checker and the linter stand alone": (
        "torch_utils/clean_exit/record.py",
        "def late():\n    from torch_utils import resource",
    ),
    "no import cycles": (
        "torch_utils/errors.py",
        "def late():\n    from torch_utils import cleanup",
    ),
    "layers of rag_demo": ("rag_demo/errors.py", "from rag_demo import retriever"),
    "encoding and storage know no retriever and no command": (
        "rag_demo/encoding/__init__.py",
        "from rag_demo import cli",
    ),
}


def test_each_import_contract_can_be_broken(tmp_path: Path) -> None:
    pytest.importorskip("importlinter", reason="the extra dev is not installed")
    for package in ("torch_utils", "rag_demo"):
        shutil.copytree(ROOT / package, tmp_path / package)
    for file, line in BROKEN.values():
        with (tmp_path / file).open("a") as module:
            module.write(f"\n{line}\n")
    config = tmp_path / "pyproject.toml"
    config.write_text(PROJECT)
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", config],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert set(re.findall(r"^(.+) BROKEN$", done.stdout, re.MULTILINE)) == set(BROKEN)


def private_tests() -> dict[str, str]:
    """Return the test files that may use private names, each with its reason."""
    section = PROJECT.partition("# Tests of private modules")[2].partition("\n\n")[0]
    return dict(
        re.findall(r'^"(tests/[^"]+)" = \["PLC2701", "SLF001"\]  # (.+)$', section, re.MULTILINE)
    )


def patches(source: str) -> list[int]:
    """Return the lines of a test that replace something of the product."""
    tree = ast.parse(source)
    ours = {
        alias.asname or alias.name.partition(".")[0]
        if isinstance(node, ast.Import)
        else alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if re.match(
            r"(torch_utils|rag_demo|clean_exit|_torch_cleanup)\b",
            alias.name if isinstance(node, ast.Import) else node.module or "",
        )
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("setattr", "delattr", "patch", "object")
        and node.args
        and re.match(r"\W*(\w+)", ast.unparse(node.args[0]))[1]
        in {*ours, "torch_utils", "rag_demo"}
    ]


def test_few_tests_use_private_names() -> None:
    """Ruff finds private imports and reads; this finds what is replaced by a patch."""
    allowed = private_tests()
    assert 0 < len(allowed) <= MOST_PRIVATE_TESTS
    assert all((ROOT / name).exists() for name in allowed), allowed
    patching = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if patches(path.read_text(encoding="utf-8"))
    }
    assert patching <= set(allowed), patching - set(allowed)


def test_patch_of_the_product_is_found() -> None:
    source = """
from torch_utils import memory_snapshot, release
import rag_demo.cli
def test(monkeypatch):
    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(release, "x", 1)
    monkeypatch.setattr(rag_demo.cli, "main", 1)
    monkeypatch.setattr("rag_demo.cli.main", 1)
    mock.patch("torch_utils.release")
"""
    assert patches(source) == [6, 7, 8, 9]
