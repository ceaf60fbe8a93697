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

PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
MOST_PRIVATE_TESTS = 15

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
assert len(names) > 30, names
"""


def test_torch_utils_imports_the_standard_library_only() -> None:
    """Each of its modules, in an interpreter without any installed package."""
    result = run(IMPORT_ALL, str(ROOT), options=("-I", "-S"))
    assert_clean(result)


def test_foreign_import_would_fail_there() -> None:
    result = run("import pytest", options=("-I", "-S"))
    assert "No module named 'pytest'" in result.stderr


@pytest.mark.parametrize("package", ["torch_utils", "clean_exit", "rag_demo"])
def test_picture_names_modules_that_exist(package: str) -> None:
    picture = (ROOT / "docs" / "architecture" / f"{package}.svg").read_text(encoding="utf-8")
    modules = re.findall(r'class="name"[^>]*>([^<]+)<', picture)
    assert len(modules) > 10
    folders = (ROOT / package, ROOT / package / "releasing")
    assert [m for m in modules if not any((folder / m).exists() for folder in folders)] == []


BROKEN = {
    "torch_utils does not know rag_demo": ("torch_utils/devices.py", "import rag_demo"),
    "the exit checker and the linter stand alone": (
        "clean_exit/report.py",
        "def late():\n    from torch_utils import resource",
    ),
    "no import cycles": (
        "torch_utils/errors.py",
        "def late():\n    from torch_utils import cleanup",
    ),
    "layers of rag_demo": ("rag_demo/errors.py", "from rag_demo import retriever"),
    "encoding and the store know no retriever and no command": (
        "rag_demo/encoding/__init__.py",
        "from rag_demo import cli",
    ),
}


@pytest.mark.slow
def test_each_import_contract_can_be_broken(tmp_path: Path) -> None:
    pytest.importorskip("importlinter", reason="the extra dev is not installed")
    for package in ("torch_utils", "clean_exit", "rag_demo"):
        shutil.copytree(ROOT / package, tmp_path / package)
    for file, line in BROKEN.values():
        assert (tmp_path / file).exists(), file
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


PUBLIC = {
    *("torch_utils", "torch_utils.fastapi", "torch_utils.prometheus", "torch_utils.resource"),
    *("clean_exit", "clean_exit.lint", "rag_demo", "rag_demo.cli"),
}
PRIVATE_TESTS = {
    "tests/applications/mutant/sitecustomize.py": "breaks the product on purpose",
    "tests/gpu/device.py": "measures a GPU with parts of clean-exit that take no GPU stand-in",
    "tests/rag_demo/documents/test_html_reader.py": "a parser",
    "tests/rag_demo/documents/test_passage_cutter.py": "an algorithm with many edges",
    "tests/rag_demo/test_store.py": "ingestion by the functions that examples use",
    "tests/rag_demo/test_memory_budget.py": "waits for devices that are rare",
    "tests/support/ray_program.py": "puts a model that records its end into actors",
    "tests/support/releasing.py": "gives the search for holders time on a busy machine",
    "tests/support/clean_exit.py": "says where the commands live; the parser of stderr",
    "tests/support/service_program.py": "starts the service in its own process",
    "tests/torch_utils/releasing/test_release.py": "the table of torch's private names",
    "tests/support/serving.py": "starts the service in the test's process",
}
"""The files that import private modules or replace something of the product, each with a reason."""
OURS = r"(torch_utils|rag_demo|clean_exit)\b"


def private_uses(source: str) -> list[int]:
    """Return the lines of a test that import a private module or replace part of the product."""
    tree, names, found = ast.parse(source), {"torch_utils", "clean_exit", "rag_demo"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [(alias.name, alias.asname) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [(node.module or "", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        for module, name in modules:
            if re.match(OURS, module):
                names.add(name or module.partition(".")[0])
                if module not in PUBLIC:
                    found.append(node.lineno)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Attribute)]
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            if name in ("setattr", "delattr", "setitem", "delitem", "patch", "object", "dict"):
                targets = node.args[:1]
        for target in targets:
            first = re.search(r"\w+", ast.unparse(target))
            if first and first[0] in names:
                found.append(target.lineno)
    return sorted(set(found))


def test_few_tests_use_private_parts_of_the_product() -> None:
    """Ruff finds private names; this finds private modules, and what is replaced by a patch."""
    uses = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / "tests").rglob("*.py")
        if (lines := private_uses(path.read_text(encoding="utf-8")))
    }
    assert len(PRIVATE_TESTS) <= MOST_PRIVATE_TESTS
    assert set(PRIVATE_TESTS) <= set(uses), "files that need no exception any more"
    others = {file: lines for file, lines in uses.items() if file not in PRIVATE_TESTS}
    assert not others, (
        f"these lines use private parts of the product: {others}; use public names, or list the "
        "file in PRIVATE_TESTS with a reason"
    )


def test_private_use_is_found() -> None:
    source = """
from torch_utils import memory_snapshot, release
import rag_demo.cli
import rag_demo.stores.index_format
from torch_utils.hosting import host
def test(monkeypatch):
    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(release, "x", 1)
    monkeypatch.setattr(rag_demo.cli, "main", 1)
    monkeypatch.setattr("rag_demo.cli.main", 1)
    mock.patch("torch_utils.release")
    patch("rag_demo.cli.main")
    rag_demo.cli.main = 1
    setattr(rag_demo.cli, "main", 1)
    monkeypatch.setitem(rag_demo.cli.X, "a", 1)
    own.attribute = 1
"""
    assert private_uses(source) == [4, 5, *range(8, 16)]
