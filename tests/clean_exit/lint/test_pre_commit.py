"""The pre-commit hook, used as a project does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.programs import ROOT

DIRTY = "class A:\n    def __del__(self):\n        import os\n"
CONFIG = """\
repos:
- repo: {repository}
  rev: {commit}
  hooks:
  - id: clean-exit-lint
"""
WHO = ("-c", "user.name=test", "-c", "user.email=test@example.org")


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return what it says."""
    command = ["git", *WHO, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def make_repository(folder: Path) -> str:
    """Make a repository of this checkout, without its tests, and return its commit."""
    listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if not name.startswith(("tests/", "benchmarks/")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "all")
    return git(folder, "rev-parse", "HEAD")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pre_commit") is None, reason="pre-commit is not installed")
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is not a checkout")
def test_hook_fails_on_a_finding_and_passes_after_the_fix(tmp_path: Path) -> None:
    commit = make_repository(tmp_path / "lint")
    project = tmp_path / "project"
    project.mkdir()
    git(project, "init", "-q")
    config = CONFIG.format(repository=tmp_path / "lint", commit=commit)
    (project / ".pre-commit-config.yaml").write_text(config)
    (project / "a.py").write_text(DIRTY)
    (project / "data.txt").write_text(DIRTY)
    git(project, "add", "-A")
    env = {**os.environ, "PRE_COMMIT_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--color", "never"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=project, env=env, capture_output=True, text=True, check=False
        )

    done = run()
    if "An unexpected error has occurred" in done.stdout and "pip" in done.stdout:
        pytest.skip("pip cannot install what builds this project")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "a.py:3:9: import: __del__: import os" in done.stdout
    assert "1 finding in 1 file" in done.stdout
    (project / "a.py").write_text("class A:\n    def __del__(self):\n        self.gone = True\n")
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed" in done.stdout
