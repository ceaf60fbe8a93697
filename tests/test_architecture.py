"""The rules of docs/architecture.md: those that no linter checks, and that the checks can fail."""

from __future__ import annotations

import re

import pytest

from tests.support.programs import ROOT, assert_clean, run

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
assert len(names) > 25, names
"""


def test_torch_utils_imports_the_standard_library_only() -> None:
    """Each of its modules, in an interpreter without any installed package."""
    assert_clean(run(IMPORT_ALL, str(ROOT), options=("-I", "-S")))
    control = run("import pytest", options=("-I", "-S"))
    assert "No module named 'pytest'" in control.stderr


@pytest.mark.parametrize("package", ["torch_utils", "clean_exit", "rag_demo"])
def test_picture_names_modules_that_exist(package: str) -> None:
    picture = (ROOT / "docs" / "architecture" / f"{package}.svg").read_text(encoding="utf-8")
    modules = re.findall(r'class="name"[^>]*>([^<]+)<', picture)
    assert len(modules) > 10
    folders = (ROOT / package, ROOT / package / "_release")
    assert [m for m in modules if not any((folder / m).exists() for folder in folders)] == []


PUBLIC = {
    *("torch_utils", "torch_utils.fastapi", "torch_utils.prometheus"),
    *("clean_exit", "clean_exit.lint", "rag_demo", "rag_demo.cli"),
}
PRIVATE_TESTS = {
    "tests/examples/applications/mutant/sitecustomize.py": "breaks the product on purpose",
    "tests/rag_demo/reading/test_formats.py": "reading by the function that examples use",
    "tests/rag_demo/reading/test_passages.py": "an algorithm with many edges",
    "tests/rag_demo/reading/test_sources.py": "reading by the function that examples use",
    "tests/rag_demo/encoding/test_embedding_cache.py": "a forked child, which cannot run a model",
    "tests/rag_demo/encoding/test_embeddings.py": "limits of a GPU on a CPU; the order of steps",
    "tests/rag_demo/search/test_exact_search.py": "a kernel, with copies that this machine lacks",
    "tests/support/ray_program.py": "puts a model that records its end into actors",
    "tests/support/releasing.py": "gives the search for holders time on a busy machine",
    "tests/support/clean_exit.py": "says where the commands live; the parser of stderr",
    "tests/support/service_program.py": "starts the service in its own process",
    "tests/torch_utils/gpu/test_sleep.py": "makes host memory a device in the rehearsal",
    "tests/torch_utils/hosting/test_pool.py": "a card whose memory is known",
    "tests/torch_utils/hosting/test_sleep.py": "makes host memory a device",
    "tests/torch_utils/releasing/test_release.py": "the table of torch's private names",
    "tests/rag_demo/service/test_faults.py": "the log, as the command configures it",
    "tests/support/serving.py": "starts the service in the test's process",
}
"""The files that import private modules, each with a reason."""


def private_modules(source: str) -> set[str]:
    """Return the modules of the product that a test imports although they are private."""
    ours = r"^ *(?:from|import) ((?:torch_utils|rag_demo|clean_exit)\b[\w.]*)"
    return set(re.findall(ours, source, re.MULTILINE)) - PUBLIC


def test_few_tests_import_private_modules() -> None:
    """Ruff finds private names; this finds private modules."""
    uses = {
        str(path.relative_to(ROOT)): modules
        for path in (ROOT / "tests").rglob("*.py")
        if (modules := private_modules(path.read_text(encoding="utf-8")))
    }
    assert set(uses) == set(PRIVATE_TESTS), f"use public names, or give a reason: {uses}"
