"""Run the tests of real programs on each Python that there is, and write a table of their verdicts.

The checker runs on the same Python. This one has its packages; the others get an environment of
their own for it, with what can be installed there, but torch, which is gigabytes. A folder as the
argument keeps these environments; else they are removed. ``PYTHONS="3.11 3.13"`` updates only
these columns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import tomllib

from tests.support.versions import ROOT, make_environment, run_tests

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"
RESULT = "clean_exit_programs"
TESTS = ["tests/clean_exit/exits/test_real_programs.py"]
VERDICTS = {"passed": "right", "failed": "wrong", "skipped": "skipped"}


def install_programs(python: Path) -> None:
    """Install the packages of the dependency group ``corpus`` one by one, as far as possible."""
    install = [sys.executable, "-m", "uv", "--quiet", "pip", "install", "--python", str(python)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for name in project["dependency-groups"]["corpus"]:
        if subprocess.run([*install, name], check=False, stderr=subprocess.DEVNULL).returncode:
            print(f"without {name}", flush=True)


def main(kept: str | None = None) -> int:
    """Make the table; return 1 if a verdict in it is wrong."""
    from benchmarks.results_file import write

    chosen = os.environ.get("PYTHONS", " ".join(VERSIONS)).split()
    path = ROOT / "benchmarks" / "results" / f"{RESULT}.json"
    counts: dict[str, Counter[str]] = json.loads(path.read_text())["counts"]
    wrong: dict[str, list[str]] = {}
    for version in chosen:
        python = Path(sys.executable)
        with tempfile.TemporaryDirectory() as temporary:
            if version != OWN:
                row = f"without-torch-{version}"
                python = make_environment(row, Path(kept or temporary, version).absolute())
                install_programs(python)
            outcomes = run_tests(python, TESTS, Path(temporary, "report.xml"), "real")
        counts[version] = Counter(VERDICTS[outcome] for outcome in outcomes.values())
        wrong[version] = [name for name, outcome in outcomes.items() if outcome == "failed"]
    write(RESULT, {"counts": dict(sorted(counts.items())), "wrong": wrong})
    print(counts, wrong, sep="\n")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
