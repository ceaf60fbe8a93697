"""The table in pyproject.toml: TOML as TOML, and the checks of the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_utils import _pyproject
from torch_utils.clean_exit.settings import read_settings

TABLES = {
    "plain": "[tool.clean_exit]\ntimeout = 3\n",
    "hyphen": "[tool.clean-exit]\ntimeout = 3\n",
    "spaces": "[ tool . clean-exit ]\ntimeout = 3\n",
    "quoted": "['tool'.\"clean-exit\"]\n'timeout' = 3\n",
    "inline": "[tool]\nclean-exit = { timeout = 3 }\n",
    "inline twice": "tool = { x = {}, clean-exit = { timeout = 3 } }\n",
    "dotted": "tool.clean-exit.timeout = 3\n",
    "below tool": "[tool]\nclean_exit.timeout = 3\n",
    "after text": "[project]\ndescription = '''\n[tool.x]\n'''\n[tool.clean-exit]\ntimeout = 3\n",
}
NO_TABLES = {
    "comment": "# [tool.clean_exit]\n# timeout = 3\n",
    "comment after": "[tool.x] # see [tool.clean_exit]\n",
    "in a string": "[project]\ndescription = '''\n[tool.clean_exit]\ntimeout = 3\n'''\n",
    "a script": "[project.scripts]\nclean-exit = 'x:main'\n[tool.x]\ny = 'clean-exit'\n",
    "a dependency": '[project]\nname = "clean-exit"\ndependencies = ["clean-exit"] # clean_exit\n',
    "another tool": "[tool.x.clean-exit]\ny = 3\n[clean-exit]\n",
    "broken elsewhere": "[tool.x\ny = \n",
}


def read(folder: Path, text: str) -> dict[str, Any]:
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return read_settings(folder)


@pytest.fixture(params=["parser", "no parser"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "no parser":  # Python 3.10 without tomli
        monkeypatch.setattr(_pyproject, "_toml", lambda: None)
    return bool(request.param == "parser")


@pytest.mark.parametrize("name", TABLES)
def test_every_way_to_write_it(name: str, tmp_path: Path, parser: bool) -> None:
    """Is read; where nothing can read it, that is said."""
    if parser:
        assert read(tmp_path, TABLES[name]) == {"timeout": 3.0}
        return
    with pytest.raises(ValueError, match="needs tomli"):
        read(tmp_path, TABLES[name])


@pytest.mark.parametrize("name", NO_TABLES)
def test_what_is_no_table(name: str, tmp_path: Path, parser: bool) -> None:
    """Is nothing, with and without a parser."""
    assert read(tmp_path, NO_TABLES[name]) == {}


WRONG = {
    "repeat = 0": "repeat: 0 is less than 1",
    "repeat = true": "repeat has to be a whole number, not True",
    "error-exitcode = 256": "256 is not an exit code",
    "error-exitcode = 0": "0 is not an exit code of a failure",
    "error-exitcode = 1.5": "has to be a whole number",
    "ignore = [1]": "ignore has to be a list of strings, not [1]",
    "ignore = 'x'": "ignore has to be a list of strings",
    "ignore = ['(']": "is not a regular expression",
    "timeout = 0": "is not more than 0 seconds",
    "timeout = nan": "is not a length of time",
    "max-shutdown = -1": "is not more than 0 seconds",
    "timeout = '3'": "has to be a number of seconds",
    "color = 'blue'": "is not one of auto, always, never",
    "github = 1": "has to be true or false",
    "tiemout = 3": "it may have",
    "error-exitcode = 3\nerror_exitcode = 4": "twice",
    "timeout = ": "is not TOML",
    f"ignore = {'[' * 5000}": "is nested too deeply",
}


@pytest.mark.parametrize("table", WRONG, ids=lambda table: table[:40])
def test_wrong_values(table: str, tmp_path: Path) -> None:
    """One line, with the file and the value."""
    with pytest.raises(ValueError, match=re.escape(WRONG[table])) as caught:
        read(tmp_path, f"[tool.clean-exit]\n{table}\n")
    assert str(tmp_path / "pyproject.toml") in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[tool]\nclean-exit = 3\n",
        "[[tool.clean-exit]]\ntimeout = 3\n",
        "[tool.clean-exit]\n[tool.clean_exit]\n",
    ],
)
def test_wrong_tables(text: str, tmp_path: Path) -> None:
    """What is no table, and two of them."""
    with pytest.raises(ValueError, match=r"has to be a table|has both"):
        read(tmp_path, text)


def test_all_that_it_may_have(tmp_path: Path) -> None:
    """As the command line makes it."""
    text = """
    timeout = 300
    max-shutdown = 2.5
    repeat = 2
    resource-warnings = true
    ignore = ["a", "b|c"]
    error-exitcode = 9
    report-json = "r.json"
    report_junit = "r.xml"
    github = false
    color = "never"
    """
    assert read(tmp_path, f"[tool.clean-exit]\n{text}") == {
        "timeout": 300.0,
        "max_shutdown": 2.5,
        "repeat": 2,
        "resource_warnings": True,
        "ignore": ["a", "b|c"],
        "error_exitcode": 9,
        "report_json": "r.json",
        "report_junit": "r.xml",
        "github": False,
        "color": "never",
    }


def test_odd_files(tmp_path: Path) -> None:
    """Bytes that are not UTF-8; a folder by that name; a current folder that is gone."""
    (tmp_path / "pyproject.toml").write_bytes(b"[tool.clean-exit] # \xff\n")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_settings(tmp_path)
    below = tmp_path / "below"
    (below / "pyproject.toml").mkdir(parents=True)
    with pytest.raises(ValueError, match="not UTF-8"):
        read_settings(below)
    program = (
        "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone');"
        "from torch_utils.clean_exit.settings import read_settings; print(read_settings())"
    )
    root = Path(_pyproject.__file__).parents[1]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {program}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "{}\n", done.stderr
