"""Rehearsals of `make test-gpu` and `make bench-gpu`, which later run unattended."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

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


def benchmark(*parts: str) -> str:
    """Rehearse parts of the benchmark, without writing results; return its output."""
    folder = ROOT / "benchmarks" / "results"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    chosen = [word for part in parts for word in ("--part", part)]
    done = run("benchmarks/gpu.py", "--rehearse", *chosen)
    assert done.returncode == 0 and "0 parts failed" in done.stdout, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")} == before
    return done.stdout


@pytest.mark.slow
def test_benchmark_prints_releases_and_streaming() -> None:
    said = benchmark("release", "measure", "streamed")
    assert len(re.findall(r"another thread waits", said)) >= 4
    assert "matrix product" in said and "of a bare upload" in said


@pytest.mark.slow
def test_benchmark_finds_what_topk_finds() -> None:
    """So it does in each type; the encoders return the same vectors."""
    said = benchmark()
    found = [float(share) for share in re.findall(r"agrees ([\d.]+)", said)]
    assert len(found) == 6 and set(found) == {1.0}
    cosines = [float(value) for value in re.findall(r"'ours_cosine\w+': ([\d.]+)", said)]
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


STAND_IN = """
import os, sys, time
from pathlib import Path
from gpu import plain

def crashes(device):
    os.abort()
def fails(device):
    one = 1
    assert one == 2
def passes(device):
    pass
def hangs(device):
    time.sleep(600)

plain.TEST_S = 2.0
plain.rewrite_asserts = lambda: None
plain.tests = lambda: [(f.__name__, f) for f in (crashes, fails, hangs, passes)]
sys.exit(plain.main("rehearsal", Path(sys.argv[2])))
"""


@pytest.mark.slow
def test_crash_or_hang_does_not_stop_other_tests(tmp_path: Path) -> None:
    from gpu import run as runner

    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    deadline = time.monotonic() + 600
    result = runner.on_device(tmp_path, "rehearsal", deadline, "", script=str(script))
    assert {name: test["outcome"] for name, test in result["tests"].items()} == {
        "crashes": "failed",
        "fails": "failed",
        "hangs": "failed",
        "passes": "passed",
    }
    assert result["complete"] and result["exit_code"] == 1
    assert "exit code -6" in result["tests"]["crashes"]["reason"]
    assert "in hangs" in result["tests"]["hangs"]["reason"]
