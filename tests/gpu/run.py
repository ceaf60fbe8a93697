"""`make test-gpu`: the tests on a GPU.

It runs unattended within six minutes, with any Python that has torch. It needs no installation. A
test that hangs or crashes does not stop the others.
The folder in ``RESULTS`` receives ``tests.json``, with the description of the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
GPU_S = 320.0
LAST_WORDS_S = 15.0
PATHS = [str(ROOT), str(ROOT / "tests")]
sys.path[:0] = PATHS


def limited(command: list[str], deadline: float, **env: str) -> int | None:
    """Run a command until the deadline; then interrupt it, so that it can report.

    Its remaining processes are killed, so that they do not keep the device.
    """
    print("+", " ".join(command), flush=True)
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **env}, start_new_session=True)
    try:
        return process.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def paths(folder: Path) -> str:
    """Return PYTHONPATH with this checkout before the caller's entries."""
    return os.pathsep.join([*PATHS, str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def on_device(
    folder: Path,
    kind: str,
    deadline: float,
    only: str,
    python: str = sys.executable,
    env: Mapping[str, str] = MappingProxyType({}),
    script: str = "tests/gpu/plain.py",
) -> dict[str, Any]:
    """Run the tests on a device, or rehearse them; start a new process after each failure."""
    from gpu import plain

    journal, done = folder / "gpu", -1
    command = [python, script, kind, str(journal), only]
    code: int | None = 1
    while code not in (0, None) and done < len(plain.read(journal)):
        done = len(plain.read(journal))
        code = limited(command, deadline, PYTHONPATH=paths(folder), **env)
        for name, test in plain.read(journal).items():
            if test["outcome"] == "started":
                how = "timed out" if code is None else f"exit code {code}"
                stacks = journal.with_suffix(".stacks").read_text(errors="replace")
                plain.note(journal, name, "failed", f"{stacks}\nended the process: {how}")
    tests = plain.read(journal)
    failed = any(test["outcome"] == "failed" for test in tests.values())
    return {"exit_code": int(failed or code != 0), "complete": code == 0, "tests": tests}


def main(*, rehearse: bool, only: str = "") -> int:
    """Run the tests; write the results unless this is a rehearsal; return the exit code."""
    from benchmarks.results_file import machine
    from gpu.device import Cuda

    started = time.monotonic()
    why_not = None if rehearse else Cuda.why_not()
    if why_not is not None:
        print(f"{why_not}; tests/gpu/run.py --rehearse runs the same tests in host memory")
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind = "rehearsal" if rehearse else "cuda"
        result: dict[str, Any] = {"machine": machine()}
        result["gpu_tests"] = on_device(folder, kind, started + GPU_S, only)
        result["seconds"] = round(time.monotonic() - started)
        _write(result, rehearse)
    exit_code: int = result["gpu_tests"]["exit_code"]
    return exit_code


def _write(result: dict[str, Any], rehearse: bool) -> None:
    tests = result["gpu_tests"]["tests"].values()
    outcomes = [test["outcome"] for test in tests]
    counts = {outcome: outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")}
    print(f"on the device: {counts}", flush=True)
    if not rehearse:
        folder = Path(os.environ.get("RESULTS") or ROOT / "benchmarks" / "results" / "gpu")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tests.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    given = [word.partition("=") for word in sys.argv[1:]]
    options = {name.removeprefix("--"): value for name, _, value in given}
    sys.exit(
        main(
            rehearse="rehearse" in options, **{k: v for k, v in options.items() if k != "rehearse"}
        )
    )
