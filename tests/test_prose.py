"""`make prose` reports what STYLE forbids, and accepts the same text in plain English."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT

NO = "no"  # Apart from its verb: this file is checked as well.
LONG = "The scope releases " + "one model and " * 10 + "one tensor."
SHORT = "The scope releases " + "one model and " * 8 + "one tensor."
FILES = {
    "a phrase": ("a.md", f"The key is {NO} string.\n", "The key is not a string.\n"),
    "none": ("a.md", f"The models are {NO}ne.\n", "There is no longer a model; `it is no file`.\n"),
    "a long sentence": ("a.md", f"# Title\n\n{LONG}\n", f"# Title\n\n{SHORT} {SHORT}\n"),
    "a block of code": ("a.md", f"```\nx\n```\n{LONG}\n", f"```\n{LONG}\n```\n{SHORT}\n"),
    "a table": ("a.md", f"| x |\n\n{LONG}\n", f"| {LONG} |\n"),
    "a docstring": ("a.py", f'"""{LONG}"""\n', f'"""{SHORT}\n\n{SHORT}\n"""\n'),
    "a message": ("a.py", f"raise ValueError('1 is {NO} int')\n", "raise ValueError('1 is not')"),
    "a comment": ("a.py", "# Who" + "ever calls waits.\n", "# The caller waits. x is None\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("dirty", [True, False])
def test_prose_reports_dirty_text_only(tmp_path: Path, dirty: bool) -> None:
    paths: list[Path] = []
    for name, text, clean in FILES.values():
        paths.append(tmp_path / f"{len(paths)}{name}")
        paths[-1].write_text(text if dirty else clean)
    command = [sys.executable, str(ROOT / "docs" / "prose.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(line.partition(":")[0] for line in done.stdout.splitlines())
    assert found == (sorted(map(str, paths)) if dirty else []), done.stdout
    assert (done.returncode, done.stderr) == (int(dirty), "")
