"""A figure without its machine says little: results name it, and so do the tables made of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks.plot_memory import POINTS, thinned
from benchmarks.results_file import described
from support import versions
from support.programs import ROOT
from support.real_table import summarise

RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
CITED = re.compile(r"^Measured on: (.+) \(`benchmarks/results/([\w/]+)\.json`\)$", re.MULTILINE)


def problems(page: str) -> list[str]:
    """Say which tables of a page do not name the machine that made the file that they cite."""
    found = []
    for said, name in CITED.findall(page):
        machine = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        if said != described(machine["machine"]):
            found.append(f"{name}.json: {described(machine['machine'])}, not {said}")
    return found


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_names_its_machine(path: Any) -> None:
    """Processor, cores, Python and torch; and it is small enough to be read.

    The linter's findings are a list to look things up in, with a line of code each.
    """
    machine = json.loads(path.read_text())["machine"]
    assert machine["processor"]
    assert machine["cores"] > 0
    assert machine["python"].startswith("3.")
    assert machine["packages"]["torch"]
    assert path.stat().st_size < (150_000 if path.stem.endswith("_findings") else 50_000)


def test_tables_name_the_machine_of_their_results() -> None:
    """Where a page cites a results file, it names the processor that the file names."""
    pages = [path.read_text(encoding="utf-8") for path in PAGES]
    assert sum(len(CITED.findall(page)) for page in pages) >= 4
    assert [problem for page in pages for problem in problems(page)] == []


def test_table_of_another_machine_is_found() -> None:
    """The control: a table that was measured elsewhere than its file."""
    line = "Measured on: Abacus, 1 cores, Python 3.11, torch 2 (`benchmarks/results/{}.json`)"
    assert len(problems(line.format("release"))) == 1


def test_table_of_real_programs_is_of_its_file() -> None:
    """Each row, as the command prints it; and another file's would not be there."""
    page = (ROOT / "docs" / "clean-exit.md").read_text(encoding="utf-8")
    path = ROOT / "benchmarks" / "results" / "clean_exit_programs.json"
    counts = json.loads(path.read_text())["counts"]
    assert all(row in page for row in summarise(counts))
    counts["3.11"]["right"] += 1
    assert summarise({"3.11": counts["3.11"]})[0] not in page


def test_table_of_versions_is_of_its_file() -> None:
    """Each row, as the command prints it; and another file's would not be there."""
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "benchmarks" / "results" / "versions.json").read_text())["rows"]
    assert rows.keys() <= versions.ROWS.keys()
    assert all(row in page for row in versions.summarise(rows))
    rows["oldest"]["passed"] += 1
    assert versions.summarise({"oldest": rows["oldest"]})[0] not in page


def test_thinning_keeps_peaks_and_falls() -> None:
    """A curve of a few hundred points at most still has each spike and each fall."""
    samples = [(float(n), 100.0) for n in range(5000)]
    samples[1234] = (1234.0, 900.0)
    samples[2345] = (2345.0, 3.0)
    thin = thinned(samples)
    assert len(thin) <= POINTS
    assert {samples[0], samples[1234], samples[2345], samples[-1]} <= set(thin)
    assert thin == sorted(thin)
