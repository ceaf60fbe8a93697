"""Rehearsals of `make test-gpu` and `make bench-gpu`, which later run unattended."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from support.programs import ROOT


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_benchmark_finds_what_topk_finds_and_writes_no_results() -> None:
    """So it does in each type; the encoders return the same vectors."""
    folder = ROOT / "benchmarks" / "results"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    done = run("benchmarks/gpu.py", "--rehearse")
    assert done.returncode == 0 and "0 parts failed" in done.stdout, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")} == before
    assert len(re.findall(r"another thread waits", done.stdout)) >= 4
    found = [float(share) for share in re.findall(r"agrees ([\d.]+)", done.stdout)]
    assert len(found) == 6 and set(found) == {1.0}
    cosines = [float(value) for value in re.findall(r"'ours_cosine\w+': ([\d.]+)", done.stdout)]
    assert len(cosines) == 6 and min(cosines) > 0.99


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["tests/gpu/run.py", pytest.param("benchmarks/gpu.py", marks=pytest.mark.slow)],
)
def test_commands_fail_without_a_gpu(command: str) -> None:
    pytest.importorskip("torch")
    done = run(command, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "needs a CUDA device" in done.stdout and done.stdout.count("\n") == 1
