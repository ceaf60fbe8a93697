"""Rehearsals of `make test-gpu` and `benchmarks.gpu`, which later run unattended."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.programs import ROOT


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        check=False,
    )


pytestmark = pytest.mark.slow


def test_benchmark_finds_what_topk_finds_and_writes_no_results() -> None:
    """So it does in each type; the encoders return the same vectors."""
    folder = ROOT / "benchmarks" / "results"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    done = run("benchmarks/gpu.py", "--rehearse", "--seconds", "1000")
    assert done.returncode == 0 and "0 parts failed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("left out: nothing\n"), done.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")} == before
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert {row["agrees"] for row in rows if "agrees" in row} == {1.0}
    cosines = [row["least_cosine"] for row in rows if "least_cosine" in row]
    assert len(cosines) == 8 and min(cosines) > 0.99
    ways = [set(row["ways"]) for row in rows if "ways" in row]
    assert len(ways) == 4 and all("torch_utils" in names for names in ways)


@pytest.mark.parametrize("command", ["tests/torch_utils/gpu/run.py", "benchmarks/gpu.py"])
def test_commands_fail_without_a_gpu(command: str) -> None:
    pytest.importorskip("torch")
    done = run(command, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "needs a CUDA device" in done.stdout and done.stdout.count("\n") == 1
