"""What README.md says of its programs, versions and links; test_docs.py runs its other code."""

import re
import subprocess
import sys

import pytest

from clean_exit import check
from tests.support.programs import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
BROKEN, FIXED = (program for program in PROGRAMS if "class Generator" in program)
ERROR = "AttributeError: 'NoneType' object has no attribute 'empty_cache'"


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


def test_long_description_of_the_wheel_has_absolute_links() -> None:
    """They lead to the address that pyproject.toml names, also those of pictures."""
    pytest.importorskip("hatch_fancy_pypi_readme", reason="the group wheel is not installed")
    command = [sys.executable, "-m", "hatch_fancy_pypi_readme"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    home = re.search(r'^Homepage = "https://github.com/(.+)"', PROJECT, re.MULTILINE)
    assert home is not None
    links = [a or b for a, b in re.findall(r'\]\((.*?)\)|src(?:set)?="(.*?)"', text)]
    place = rf"https://(?:github|raw\.githubusercontent)\.com/{home[1]}(?:/blob)?/main/"
    relative = re.findall(r'\]\((?!https:)(.*?)\)|src(?:set)?="(.*?)"', README)
    files = [re.sub(place, "", link) for link in links if re.match(place, link)]
    assert files == [a or b for a, b in relative]
    assert [file for file in files if not (ROOT / file.partition("#")[0]).exists()] == []
