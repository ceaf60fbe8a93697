"""The rehearsal of `benchmarks.gpu`, which later runs unattended."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.programs import ROOT


@pytest.mark.slow
def test_benchmark_finds_what_topk_finds_and_writes_no_results() -> None:
    """So it does in each type; the encoders return the same vectors."""
    folder = ROOT / "benchmarks" / "results"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--rehearse", "--seconds", "1000"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "0 parts failed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("left out: nothing\n"), done.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")} == before
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert {row["agrees"] for row in rows if "agrees" in row} == {1.0}
    cosines = [row["least_cosine"] for row in rows if "least_cosine" in row]
    assert len(cosines) == 8 and min(cosines) > 0.99
    assert ["torch_utils" in row["ways"] for row in rows if "ways" in row] == [True] * 4
