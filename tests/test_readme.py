"""What README.md claims about commands, versions and names. tests/test_docs.py runs its code."""

from __future__ import annotations

import re

from support.programs import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (?:[A-Z_]+=\S+ )?(\S+) (\S+)", README, re.MULTILINE)


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
