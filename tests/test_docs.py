"""README.md and the pages in docs/: their code runs, and they read as plain Markdown."""

import importlib
import itertools
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import ROOT, assert_clean, run, run_forked

DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
SLOW = ("SentenceTransformer", "rag_demo", "transformers import")
"""Blocks with these words load a model, which takes seconds."""


def python_blocks() -> list[Any]:
    """Return the Python blocks of all pages that run and exit cleanly.

    One that begins with "# not run" is a fragment. README.md has one with a broken destructor.
    """
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # These parts have tests of their own.
        text = re.sub(r"<!-- (file|text|api): .*?<!-- end -->", "", text, flags=re.DOTALL)
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for number, block in enumerate(blocks):
            if not block.startswith("# not run") and "def __del__" not in block:
                marks = pytest.mark.slow if any(word in block for word in SLOW) else ()
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
    text = page.read_text(encoding="utf-8")
    if "<!-- names: rag_demo" in text:  # One of them is for PostgreSQL.
        pytest.importorskip("psycopg")
    assert text == figures.filled(page)


@pytest.mark.parametrize("package", ["torch_utils", "clean_exit", "rag_demo"])
def test_picture_of_the_architecture_is_up_to_date(package: str) -> None:
    """`python -m docs.architecture_pictures` draws it again, from the imports."""
    pictures = importlib.import_module("docs.architecture_pictures")
    found = (DOCS / "architecture" / f"{package}.svg").read_text(encoding="utf-8")
    assert found == pictures.picture(package)


def test_commands_page_names_every_source_format() -> None:
    sources = pytest.importorskip("rag_demo.reading.sources")
    page = (DOCS / "rag_demo" / "commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `[.-].*", page, re.MULTILINE)
    named = {each for row in rows for each in re.findall(r"`(\.\w+)`", row.split("|")[1])}
    assert named == {*sources.READERS, *sources.RECORDS} - {""}


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
    page = DOCS / ("rag_demo" if package == "rag_demo" else "") / "reference.md"
    headings = set(re.findall(r"^#### `(\w+)`$", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(importlib.import_module(package).__all__) - headings == set()


def parsed(page: Path) -> list[Any]:
    """Parse a page as CommonMark with GitHub's tables."""
    reader = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    tokens: list[Any] = reader.parse(page.read_text(encoding="utf-8"))
    return tokens


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: dict[str, int] = {}
    tokens = parsed(page)
    for opening, inline in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            title = "".join(child.content for child in inline.children)
            slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            while slug in found:
                found[slug] += 1
                slug = f"{slug}-{found[slug]}"
            found[slug] = 0
    return set(found)


def links(page: Path) -> list[str]:
    """Return the targets of links and pictures."""
    inline = [child for token in parsed(page) for child in token.children or ()]
    return [child.attrs.get("href") or child.attrs.get("src") for child in inline if child.attrs]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_is_plain_markdown(page: Path) -> None:
    """GitHub shows the directives of other tools as they are."""
    for token in parsed(page):
        assert not token.info.startswith("{"), token.info
        plain = "".join(child.content for child in token.children or () if child.type == "text")
        assert not re.search(r":::|\{(eval-rst|py:|ref\}|doc\})", plain), plain


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        is_there = target.exists() and (not anchor or anchor in anchors(target))
        if not is_there and not re.match(r"https?:|mailto:", link):
            wrong.append(link)
    assert wrong == []
    assert links(DOCS / "index.md"), "the control"


def test_index_lists_every_page_once() -> None:
    pages = [str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md"))]
    assert sorted([*links(DOCS / "index.md"), "index.md"]) == sorted(pages)
