"""The wheel: both packages, typed, a second name for the entry points, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from programs import ROOT


def test_wheel_holds_both_packages(tmp_path: Path) -> None:
    """What pip would install is complete, and torch_utils in it imports from there."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("torch_cleanup-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in (
        "torch_utils/__init__.py",
        "torch_utils/py.typed",
        "rag_demo/cli.py",
        "rag_demo/py.typed",
    ):
        assert wanted in names
    tops = {name.split("/")[0] for name in names}
    ours = {"torch_utils", "rag_demo", "_torch_cleanup"}
    assert {top for top in tops if not top.endswith(".dist-info")} == ours
    program = "import sys, torch_utils; assert '.whl' in torch_utils.__file__, torch_utils.__file__"
    subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(wheel)!r}); {program}"],
        check=True,
    )
