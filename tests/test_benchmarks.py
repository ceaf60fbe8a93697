"""A figure without its machine says little: results name it, and so do the tables made of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks.bench_cycles import table
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
    assert sum(len(CITED.findall(page)) for page in pages) >= 8
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


def test_table_of_hosting_is_of_its_file() -> None:
    """Each row, as the benchmark prints it; and another file's rows would not be there."""
    page = (ROOT / "docs" / "hosting.md").read_text(encoding="utf-8")
    ways = json.loads((ROOT / "benchmarks" / "results" / "cycles.json").read_text())["ways"]
    assert all(row in page for row in table(ways))
    ways["process"]["idle_mb"][-1] += 1
    assert not all(row in page for row in table(ways))


def test_thinning_keeps_peaks_and_falls() -> None:
    """A curve of a few hundred points at most still has each spike and each fall."""
    samples = [(float(n), 100.0) for n in range(5000)]
    samples[1234] = (1234.0, 900.0)
    samples[2345] = (2345.0, 3.0)
    thin = thinned(samples)
    assert len(thin) <= POINTS
    assert {samples[0], samples[1234], samples[2345], samples[-1]} <= set(thin)
    assert thin == sorted(thin)


GPU_PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
NOT_YET = {"not run yet", "not measured yet"}


def claims(page: str) -> list[tuple[str, str]]:
    """What each promise or figure of the page about GPUs has in its last two columns."""
    start = page.index("## Promises")
    rows = [line.strip("| ").split(" | ") for line in page[start:].splitlines() if "|" in line]
    return [(row[-2], row[-1]) for row in rows if len(row) == 3 and "`torch." not in row[-2]]


def unfounded(page: str) -> list[str]:
    """Claims that name a test that is not there, or a figure without the file that it is from."""
    found = []
    for middle, last in claims(page):
        for name, test in re.findall(r"`(test_\w+)::(test_\w+)`", middle):
            path = ROOT / "tests" / "gpu" / f"{name}.py"
            if not path.exists() or f"def {test}(" not in path.read_text(encoding="utf-8"):
                found.append(f"{name}::{test} is not there")
        if last not in NOT_YET and last not in ("on a GPU", "measured", "torch 2.13", "the same"):
            named = re.findall(r"`(benchmarks/results/gpu/\w+\.json)`", last)
            if not named or not all((ROOT / file).exists() for file in named):
                found.append(f"{last!r} names no file")
    return found


def test_gpu_page_claims_nothing_without_a_file() -> None:
    """Its tests are there, and what a GPU has said stands in a file, or not at all."""
    assert len([last for _, last in claims(GPU_PAGE) if last in NOT_YET]) > 20
    assert unfounded(GPU_PAGE) == []


def test_gpu_claims_without_a_file_are_found() -> None:
    """The control: a figure of nobody's, and a test that does not exist."""
    page = GPU_PAGE.replace("| 90% | not measured yet |", "| 90% | 93% |", 1)
    page = page.replace("::test_after_a_scope`", "::test_after_nothing`", 1)
    assert len(unfounded(page)) == 2
