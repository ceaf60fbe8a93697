"""README.md and the pages in docs/: their code runs, their links lead to files."""

from __future__ import annotations

import importlib
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT, assert_clean, run, run_forked

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
SLOW = ("SentenceTransformer", "rag_demo", "transformers import")
"""Blocks with these words load a model, which takes seconds."""


def python_blocks() -> list[Any]:
    """Return the Python blocks of all pages that run and exit cleanly.

    One that begins with "# not run" is a fragment. README.md has one with a broken destructor.
    """
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"<!-- file: .*?<!-- end -->", "", text, flags=re.DOTALL)  # has its own test
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for number, block in enumerate(blocks):
            if not block.startswith("# not run") and "def __del__" not in block:
                marks = [pytest.mark.slow] if any(word in block for word in SLOW) else []
                found.append(pytest.param(block, id=f"{page.stem}-{number}", marks=marks))
    return found


def expected_output(block: str) -> str:
    """Return what the comment lines at the end of a block say that it prints."""
    lines = block.splitlines()
    start = len(lines)
    while lines[start - 1].startswith("# "):
        start -= 1
    return "".join(f"{line.removeprefix('# ')}\n" for line in lines[start:])


def need_imports(block: str) -> None:
    """Skip if a package that a block imports is not installed."""
    for name in re.findall(r"^ *(?:import|from) (\w+)", block, re.MULTILINE):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("block", python_blocks())
def test_python_block_runs(block: str, pytester: pytest.Pytester) -> None:
    need_imports(block)
    if "\ndef test_" in block:
        pytester.makepyfile(block)
        outcomes = pytester.runpytest_subprocess().parseoutcomes()
        assert set(outcomes) == {"passed"}
        return
    result = run_forked(block, env={"TQDM_DISABLE": "1"})
    assert_clean(result)
    assert result.stdout.endswith(expected_output(block))


GENERATED = [page for page in PAGES if "<!-- end -->" in page.read_text(encoding="utf-8")]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="help texts vary with Python's version")
@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.stem)
def test_page_is_up_to_date(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make figures` writes it again."""
    monkeypatch.syspath_prepend(str(DOCS))
    figures = importlib.import_module("figures")
    assert page.read_text(encoding="utf-8") == figures.filled(page)


def test_no_page_has_an_unfilled_placeholder() -> None:
    assert [page.name for page in PAGES if "{{" in page.read_text(encoding="utf-8")] == []


def test_tutorial_about_exits_shows_the_real_error(tmp_path: Path) -> None:
    folder = DOCS / "tutorials"
    source = (folder / "main.py").read_text(encoding="utf-8")
    env = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    before = run(source, env=env)
    assert "TypeError: 'NoneType' object is not callable" in before.stderr
    assert (before.returncode, before.stdout) == (0, "ready: 2 connections\n")
    after = run(source.replace("pool_before", "pool_after"), env=env)
    assert_clean(after)
    assert after.stdout.endswith("disconnected first\ndisconnected second\n")


@pytest.mark.parametrize("package", ["torch_utils", "clean_exit", "rag_demo"])
def test_reference_has_every_public_name(package: str) -> None:
    page = (DOCS / "reference" / f"{package}.md").read_text(encoding="utf-8")
    described = set(re.findall(rf":: {package}\.(\w+)$", page, re.MULTILINE))
    assert set(importlib.import_module(package).__all__) - described == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_measured_tables_are_generated() -> None:
    """A page that cites a file of results by hand would not follow it."""
    texts = {page.name: page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")}
    generated = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)
    assert [n for n, text in texts.items() if "Measured on" in generated.sub("", text)] == []


def test_gpu_page_names_tests_that_exist() -> None:
    page = (DOCS / "gpu.md").read_text(encoding="utf-8")
    tests = re.findall(r"`(test_\w+)::(test_\w+)`", page)
    sources = {
        path.stem: path.read_text()
        for path in (ROOT / "tests" / "torch_utils" / "gpu").glob("test_*.py")
    }
    assert len(tests) > 20
    assert [pair for pair in tests if f"def {pair[1]}(" not in sources.get(pair[0], "")] == []
