"""Every code block of the README runs, and leaves cleanly."""

from __future__ import annotations

import re

import pytest
from programs import ROOT, assert_clean, run

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^\$ (\S+) (\S+)", README, re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block_runs(block: str) -> None:
    """Each on its own, in a fresh interpreter."""
    # transformers draws a progress bar on stderr while it loads weights; that is no error.
    assert_clean(run(block, env={"TQDM_DISABLE": "1"}))


def test_lifecycle_page_runs() -> None:
    """The first example of the guide; the second needs a web application around it."""
    page = (ROOT / "docs" / "lifecycle.md").read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    result = run(block)
    assert_clean(result)
    assert result.stdout == "released\n"


def test_memory_page_runs() -> None:
    """Every example of the guide to memory."""
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        assert_clean(run(block))


def test_first_block_stands_early() -> None:
    """A reader sees code within the first 30 lines."""
    assert README[: README.index("```python")].count("\n") < 30


def test_commands_exist() -> None:
    """Each command that the README shows is one that there is."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    rag_commands = {"index", "search", "demo"}
    for command, argument in COMMANDS:
        known = {"make": targets, "rag-demo": rag_commands, "pip": {"install"}}[command]
        assert argument in known, (command, argument)


def test_functions_of_the_table_exist() -> None:
    """The table of functions names what is there, and misses no function."""
    import torch_utils

    table = README[README.index("## The functions") : README.index("## rag_demo")]
    named = set(re.findall(r"`(\w+)", table))
    functions = {n for n in torch_utils.__all__ if n[0].islower()}
    assert functions <= named
