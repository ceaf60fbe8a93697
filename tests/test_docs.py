"""README.md and the pages in docs/: their code runs, their links lead to files."""

from __future__ import annotations

import importlib
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
    result = run_forked(block, env={"TQDM_DISABLE": "1"}, quick_end=True)
    assert_clean(result)
    assert result.stdout.endswith(expected_output(block))


GENERATED = [page for page in PAGES if "<!-- end -->" in page.read_text(encoding="utf-8")]


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="help texts vary with Python's version")
@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.stem)
def test_page_is_up_to_date(page: Path) -> None:
    """`python -m docs.figures` writes it again."""
    figures = importlib.import_module("docs.figures")
    assert page.read_text(encoding="utf-8") == figures.filled(page)


def test_page_about_destructors_shows_the_real_error() -> None:
    page = (DOCS / "from-del-to-resource.md").read_text(encoding="utf-8")
    before, after = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
    broken = run(before, as_file=True)
    assert "line 14, in __del__" in broken.stderr
    assert "TypeError: 'NoneType' object is not callable" in broken.stderr
    assert (broken.returncode, broken.stdout) == (0, "ready: 2 connections\n")
    assert_clean(run(after, as_file=True))


@pytest.mark.parametrize("package", ["torch_utils", "clean_exit", "rag_demo"])
def test_reference_has_every_public_name(package: str) -> None:
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    described = set(re.findall(rf":: {package}\.(\w+)$", page, re.MULTILINE))
    assert set(importlib.import_module(package).__all__) - described == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
