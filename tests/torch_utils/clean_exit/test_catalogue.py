"""clean-exit --explain, and that the catalogue is installed with the package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from programs import ROOT
from torch_utils.clean_exit import FINDINGS, Finding
from torch_utils.clean_exit.catalogue import explain

EXPLAIN = [sys.executable, "-m", "torch_utils.clean_exit", "--explain"]


@pytest.mark.parametrize("name", FINDINGS)
def test_every_finding_is_explained(name: str) -> None:
    """By its section, and nothing of the next one; findings say how to get there."""
    text = explain(name)
    assert text.startswith(f"{name}: {FINDINGS[name]}\n\n")
    assert "**What it means.**" in text
    assert "\n## " not in text
    assert Finding(name, "").help == f"clean-exit --explain {name}"


def test_command() -> None:
    """It prints the entry, and runs nothing; an unknown id gets those that there are."""
    done = subprocess.run([*EXPLAIN, "hang"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, explain("hang"), "")
    done = subprocess.run([*EXPLAIN, "hnag", "true"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (125, "")
    assert all(name in done.stderr for name in FINDINGS)


@pytest.mark.slow
def test_wheel_has_the_catalogue_and_a_name_of_its_own(tmp_path: Path) -> None:
    """Built from the checkout and from the sdist; without the checkout, the entry is found."""
    for kinds in (["wheel"], ["sdist"]):
        folder = tmp_path / kinds[0]
        command = [sys.executable, "-m", "hatchling", "build", "-t", kinds[0], "-d", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    subprocess.run(
        ["tar", "xzf", *map(str, (tmp_path / "sdist").glob("*.tar.gz"))], cwd=tmp_path, check=True
    )
    (source,) = tmp_path.glob("torch_cleanup-*")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "2")]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    program = "import sys; from _torch_cleanup.clean_exit.cli import main; sys.exit(main())"
    for folder in (tmp_path / "wheel", tmp_path / "2"):
        (wheel,) = folder.glob("*.whl")
        installed = folder / "installed"
        zipfile.ZipFile(wheel).extractall(installed)
        page = installed / "torch_utils" / "clean_exit" / "catalogue.md"
        assert page.read_text() == (ROOT / "docs" / "catalogue.md").read_text()
        (entries,) = installed.glob("*.dist-info/entry_points.txt")
        assert "clean_exit = _torch_cleanup.pytest_plugin" in entries.read_text()
        # -S: not what this Python has installed.
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c",
             f"import sys; sys.path.insert(0, {str(installed)!r}); {program}", "--explain", "hang"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout.strip() == explain("hang"), done.stderr


def test_clean_exit_names_its_own_relatively() -> None:
    """Or it could not be loaded by the second name; a name in full is found by this."""
    folder = ROOT / "torch_utils"
    files = [*(folder / "clean_exit").glob("*.py"), folder / "pytest_plugin.py"]
    assert len(files) > 10
    absolute = [
        (path.name, line)
        for path in files
        for line in path.read_text().splitlines()
        if line.strip().startswith(("from torch_utils", "import torch_utils"))
    ]
    assert absolute == []
