"""Results name the machine that made them, and so do the tables in the documentation."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks.plot_memory import POINTS, thinned
from benchmarks.results_file import described
from support import versions
from support.programs import ROOT

RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
CITED = re.compile(r"^Measured on: (.+) \(`benchmarks/results/([\w/]+)\.json`\)$", re.MULTILINE)


def problems(page: str) -> list[str]:
    """Return the tables of a page that name another machine than the file that they cite."""
    found = []
    for stated, name in CITED.findall(page):
        machine = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        if stated != described(machine["machine"]):
            found.append(f"{name}.json: {described(machine['machine'])}, not {stated}")
    return found


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_names_its_machine(path: Any) -> None:
    machine = json.loads(path.read_text())["machine"]
    assert machine["processor"]
    assert machine["cores"] > 0
    assert machine["python"].startswith("3.")
    assert machine["packages"]["torch"]
    assert path.stat().st_size < (150_000 if path.stem.endswith("_findings") else 50_000)


def test_tables_name_the_machine_of_their_results() -> None:
    pages = [path.read_text(encoding="utf-8") for path in PAGES]
    assert sum(len(CITED.findall(page)) for page in pages) >= 1
    assert [problem for page in pages for problem in problems(page)] == []


def test_table_that_names_another_machine_is_found() -> None:
    line = "Measured on: Abacus, 1 cores, Python 3.11, torch 2 (`benchmarks/results/{}.json`)"
    assert len(problems(line.format("release"))) == 1


def test_versions_page_has_the_rows_of_its_file() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "benchmarks" / "results" / "versions.json").read_text())["rows"]
    assert rows.keys() <= versions.ROWS.keys()
    assert all(row in page for row in versions.summarise(rows))
    rows["oldest"]["passed"] += 1
    assert versions.summarise({"oldest": rows["oldest"]})[0] not in page


def test_thinning_keeps_peaks_and_falls() -> None:
    samples = [(float(n), 100.0) for n in range(5000)]
    samples[1234] = (1234.0, 900.0)
    samples[2345] = (2345.0, 3.0)
    thin = thinned(samples)
    assert len(thin) <= POINTS
    assert {samples[0], samples[1234], samples[2345], samples[-1]} <= set(thin)
    assert thin == sorted(thin)
