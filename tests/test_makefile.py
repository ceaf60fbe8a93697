"""`make demo` and `make test` begin at once, or refuse at once and say what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs import ROOT

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
    """A clone, as far as make looks at it, on a machine that has not run it yet."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make on a path where every Python is what the test has put there."""
    names = ("make", "sh", "touch")
    for name in names:
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
def test_old_python_is_refused_in_one_line(folder: Path, target: str) -> None:
    """It names the Python, and the way out; nothing has been made."""
    put(folder, "python3.10", OLD)
    done = make(folder, target, "PYTHON=python3.10")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "python3.10 is 3.10.13: make PYTHON=python3.12 " + target in done.stderr
    assert not (folder / ".venv").exists()


def test_no_python_is_refused_in_one_line(folder: Path) -> None:
    """Where there is none, and where there is none but an old one."""
    for said in ("python3 is not there", "python3 is 3.10.13"):
        done = make(folder, "test")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert said in done.stderr
        put(folder, "python3", OLD)


@needs_new_python
def test_python_that_is_new_enough_is_found(folder: Path) -> None:
    """The control: beside an old python3, the first that is new enough makes the environment."""
    put(folder, "python3", OLD)
    (folder / "bin" / "python3.12").symlink_to(sys.executable)
    done = make(folder, "--dry-run", "test")
    assert done.returncode == 0, done.stderr
    assert "\npython3.12 -m venv .venv\n" in done.stdout


@needs_new_python
def test_the_slow_ones_are_what_the_fast_ones_leave_out(folder: Path) -> None:
    """Together they are all, and `make test test-all` runs none of them twice."""
    (folder / "bin" / "python3.11").symlink_to(sys.executable)
    said = make(folder, "--dry-run", "test", "test-all").stdout
    lines = [line for line in said.splitlines() if " -m pytest " in line]
    marks = [line.partition("--dist loadgroup ")[2].strip() for line in lines]
    assert marks == [
        '-m "not slow"',
        '-m "slow and not real"',
        "-m real",
    ]
