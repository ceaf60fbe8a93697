"""Results name the machine that made them; docs/figures.py makes tables of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.charts import POINTS, thinned
from tests.support.programs import ROOT

RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_names_its_machine(path: Any) -> None:
    machine = json.loads(path.read_text())["machine"]
    assert machine["processor"]
    assert machine["cores"] > 0
    assert machine["python"].startswith("3.")
    assert machine["packages"]["torch"]
    assert path.stat().st_size < (150_000 if path.stem.endswith("_findings") else 50_000)


def test_thinning_keeps_peaks_and_falls() -> None:
    samples = [(float(n), 100.0) for n in range(5000)]
    samples[1234] = (1234.0, 900.0)
    samples[2345] = (2345.0, 3.0)
    thin = thinned(samples)
    assert len(thin) <= POINTS
    assert {samples[0], samples[1234], samples[2345], samples[-1]} <= set(thin)
    assert thin == sorted(thin)
