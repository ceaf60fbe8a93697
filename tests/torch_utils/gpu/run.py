"""`make test-gpu`: the tests on a GPU, within 150 seconds.

It runs unattended, with any Python that has torch and pytest, and installs nothing. First come the
tests that need the whole card, then the others, up to six at a time with pytest-xdist.
The folder in ``RESULTS`` receives ``tests.json``, with the description of the machine.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 145.0
sys.path[:0] = [str(ROOT)]


def run_tests(
    kind: str,
    limit_s: float,
    python: str = sys.executable,
    env: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run the tests on a device; stop them when the time is over.

    Args:
        kind: "cuda", or "rehearsal" for host memory.
        limit_s: The seconds for all tests.
        python: The interpreter.
        env: Variables of its environment.

    Returns:
        The outcome of each test, and the exit code: 1 if one failed or there was no time for it.
    """
    end = time.monotonic() + limit_s
    pytest = [python, "-m", "pytest", "tests/torch_utils/gpu", "-W", "ignore", "-q"]
    marks = "gpu" if kind == "cuda" else "not gpu"
    pytest += ["-k", "rehearsal"] * (kind == "rehearsal")
    pytest += [f"--timeout={limit_s / 2}"] * bool(find_spec("pytest_timeout"))
    beside = ["-n", str(min(6, os.cpu_count() or 1))] * bool(find_spec("xdist"))
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder, "journal")
        journal.touch()
        variables = {**os.environ, "GPU_JOURNAL": str(journal), **env}
        for options in (["-m", f"{marks} and alone"], ["-m", f"{marks} and not alone", *beside]):
            process = subprocess.Popen(
                [*pytest, *options], cwd=ROOT, env=variables, start_new_session=True
            )
            try:
                code |= int(process.wait(max(1.0, end - time.monotonic())) != 0)
            except subprocess.TimeoutExpired:
                print("there was no time for the other tests", flush=True)
                code = 1
            finally:  # What remains would keep the device.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        entries = list(map(json.loads, journal.read_text(encoding="utf-8").splitlines()))
    return {"exit_code": code, "tests": {entry.pop("test"): entry for entry in entries}}


def main(*, rehearse: bool) -> int:
    """Run the tests; write the results unless this is a rehearsal; return the exit code."""
    from tests.torch_utils.gpu.device import Cuda

    started = time.monotonic()
    if not rehearse and (why_not := Cuda.why_not()):
        print(f"{why_not}; --rehearse runs the same tests in host memory")
        return 1
    done = run_tests("rehearsal", 10 * LIMIT_S) if rehearse else run_tests("cuda", LIMIT_S)
    seconds = round(time.monotonic() - started)
    if not rehearse:
        from benchmarks.gpu_setting import Setting, describe_gpu
        from benchmarks.results_file import RESULTS, commit, write_into

        about = {"commit": commit(), "gpu": describe_gpu(Setting(rehearse=False))}
        folder = Path(os.environ.get("RESULTS") or RESULTS / "gpu").resolve()
        write_into(folder, "tests", {**about, "gpu_tests": done, "seconds": seconds})
    print(dict(Counter(test["outcome"] for test in done["tests"].values())), f"in {seconds} s")
    return int(done["exit_code"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="run in host memory")
    sys.exit(main(**vars(parser.parse_args())))
