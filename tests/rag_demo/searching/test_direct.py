"""Rows that are all multiplied: right in each way, and in no other thread for a single query."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rag_demo.searching import direct
from rag_demo.vectors import normalized, rounding

PROGRAM = """
import os, sys, threading, time
import numpy as np
from rag_demo.searching.direct import _products

def ran():
    "Nanoseconds that other threads have run for."
    others = {int(name) for name in os.listdir("/proc/self/task")} - {threading.get_native_id()}
    files = [f"/proc/self/task/{number}/schedstat" for number in others]
    return sum(int(open(file).read().split()[0]) for file in files)

rows = np.ones((10_000, 384), np.float32)
for way in (_products, lambda rows, query: rows @ query):
    before = None
    while before != ran():  # They stop to spin some time after they were started.
        before = ran()
        time.sleep(0.05)
    for _ in range(10):
        way(rows, rows[0])
    print(ran() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs /proc's schedstat")
def test_one_query_waits_for_no_other_thread() -> None:
    """What other threads run for meanwhile; the control is numpy's own product."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    ours, control = map(int, run.stdout.split())
    if not control:
        pytest.skip("numpy's library uses no second thread here")
    assert ours < control / 10


@pytest.mark.parametrize("numpy_has", ["vecdot", "no vecdot"])
@pytest.mark.parametrize("rows", [1, 33, direct.FEW_ROWS + 1])
def test_products_with_one(numpy_has: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of float64, within what float32 may err."""
    if numpy_has != "vecdot":
        monkeypatch.delattr(np, "vecdot", raising=False)
    chance = np.random.default_rng(rows)
    vectors, query = (normalized(chance.standard_normal((n, 24))) for n in (rows, 1))
    expected = vectors.astype(np.float64) @ query[0]
    found = direct._products(vectors, query[0])
    assert found.shape == (rows,) and np.abs(found - expected).max() <= rounding(24) / 2


def test_among_some_rows_one_query_finds_what_several_find() -> None:
    """The rows that may be among the best are found by either product."""
    chance = np.random.default_rng(0)
    vectors, queries = (normalized(chance.standard_normal((n, 24))) for n in (3_000, 4))
    rows = np.arange(0, 3_000, 2)
    several = direct.best_among(rows, queries, 5, vectors.__getitem__)
    for number in range(4):
        one = direct.best_among(rows, queries[number : number + 1], 5, vectors.__getitem__)
        best = rows[np.argsort(-(vectors[rows].astype(np.float64) @ queries[number]))[:5]]
        assert set(best) <= set(one.row)
        assert set(one.row) == set(several.row[several.query == number])
