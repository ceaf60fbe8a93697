"""`make` finds a Python or refuses in one line; constraints.txt pins what it installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
needs_new_python = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the Makefile's environments need Python 3.11"
)
OLD = f"""#!/bin/sh
exec {sys.executable} -c "
import sys
sys.version_info, sys.version = (3, 10, 13), '3.10.13 (main)'
exec(sys.argv[2])" "$@"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A new clone, with the files that make reads."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make with a PATH that contains only the Pythons of the test."""
    for name in ("make", "sh", "touch"):
        if not (folder / "bin" / name).exists():
            (folder / "bin" / name).symlink_to(shutil.which(name) or name)
    unwanted = ("PYTHON", "PYTEST_OPTIONS", "MAKEFLAGS", "MAKELEVEL")
    env = {name: value for name, value in os.environ.items() if name not in unwanted}
    env["PATH"] = str(folder / "bin")
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def put(folder: Path, name: str, script: str) -> None:
    (folder / "bin" / name).write_text(script)
    (folder / "bin" / name).chmod(0o755)


@pytest.mark.parametrize("target", ["demo", "test", "lint"])
def test_make_refuses_old_python_in_one_line(folder: Path, target: str) -> None:
    put(folder, "python3.10", OLD)
    done = make(folder, target, "PYTHON=python3.10")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "python3.10 is 3.10.13: make PYTHON=python3.12 " + target in done.stderr
    assert not (folder / ".venv").exists()


def test_make_refuses_missing_python_in_one_line(folder: Path) -> None:
    for message in ("python3 is not there", "python3 is 3.10.13"):
        done = make(folder, "test")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert message in done.stderr
        put(folder, "python3", OLD)


@needs_new_python
def test_make_uses_first_python_that_is_new_enough(folder: Path) -> None:
    put(folder, "python3", OLD)
    (folder / "bin" / "python3.12").symlink_to(sys.executable)
    done = make(folder, "--dry-run", "test")
    assert done.returncode == 0, done.stderr
    assert "\npython3.12 -m venv .venv\n" in done.stdout


@needs_new_python
def test_constraints_pin_every_dependency() -> None:
    import tomllib

    def name(requirement: str) -> str:
        return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")

    with (ROOT / "pyproject.toml").open("rb") as file:
        pyproject = tomllib.load(file)
    extras = pyproject["project"]["optional-dependencies"]
    wanted = {
        name(requirement)
        for requirements in (*extras.values(), *pyproject["dependency-groups"].values())
        for requirement in requirements
        if isinstance(requirement, str)
    }
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {name(line) for line in lines if "==" in line}
    assert wanted <= pins, wanted - pins
    assert not [line for line in lines if "/" in line or "--" in line or "nvidia" in line]
