"""What README.md says of its programs, commands, versions and links; test_docs.py runs its code."""

from __future__ import annotations

import re

import pytest

from clean_exit import check
from tests.support.programs import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (\S+) (\S+)", README, re.MULTILINE)
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
BROKEN, FIXED = (program for program in PROGRAMS if "class Trainer" in program)
ERROR = "AttributeError: 'NoneType' object has no attribute 'is_available'"


@pytest.mark.parametrize(("program", "exit_code"), [(BROKEN, 120), (FIXED, 0)])
def test_clean_exit_tells_the_broken_program_from_the_fixed_one(
    program: str, exit_code: int
) -> None:
    pytest.importorskip("torch")
    report = check(["-c", program], max_shutdown_s=300, timeout_s=600)
    assert report.exit_code == exit_code
    assert (ERROR in report.stderr) == (exit_code == 120)
    assert report.stdout == ("" if exit_code else "cleaned up\n")
    assert ERROR in README


def test_picture_shows_the_same_error() -> None:
    picture = (ROOT / "docs" / "clean-exit.svg").read_text(encoding="utf-8")
    assert "is_available" in picture
    assert "url(http" not in picture


def test_commands_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make (\w+)`", README)) == {"demo", "test"} <= set(targets)
    assert COMMANDS == [("pip", "install")]


def test_versions_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f"Python {versions[0]} to {versions[-1]}" in README
    assert f'requires-python = ">={versions[0]}"' in project
    torch = re.search(r'^torch = \["torch>=([\d.]+)"\]', project, re.MULTILINE)
    assert torch is not None
    assert f"torch {torch[1]} or newer" in README


def test_links_lead_to_files() -> None:
    """They are absolute, so that they also work on a package index."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    links = re.findall(r'\]\((.*?)\)|src(?:set)?="(.*?)"', README)
    links = [link for pair in links for link in pair if link and "/issues/" not in link]
    home = re.search(r'^Homepage = "https://github.com/(.+)"', project, re.MULTILINE)
    assert home is not None
    place = rf"https://(?:github|raw\.githubusercontent)\.com/{home[1]}(?:/\w+)?/main/"
    assert all(re.match(place, link) for link in links)
    files = [re.sub(place, "", link) for link in links]
    assert [file for file in files if not (ROOT / file).exists()] == []
