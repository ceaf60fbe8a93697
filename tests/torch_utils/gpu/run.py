"""`make test-gpu`: the tests on a GPU, within 150 seconds.

It runs unattended, with any Python that has torch, and installs nothing. It first lists the tests
that it skips for lack of a package, and at the end those that it left out for lack of time. A test
that hangs or crashes does not stop the others.
The folder in ``RESULTS`` receives ``tests.json``, with the description of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
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

ROOT = Path(__file__).resolve().parents[3]
# When each part ends at the latest, in seconds from the start. Parts inherit unused time.
ENDS_S = {"alone": 45.0, "beside": 118.0, "last": 145.0}
LAST_WORDS_S = 3.0
sys.path[:0] = [str(ROOT)]


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
    return os.pathsep.join([str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def on_device(
    folder: Path,
    kind: str,
    ends: Mapping[str, float],
    only: str,
    python: str = sys.executable,
    env: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run the tests on a device, or rehearse them.

    Args:
        folder: An empty folder.
        kind: The device: "cuda", "rehearsal" or "stand-in".
        ends: When each part ends at the latest, on the monotonic clock.
        only: A part of the names of the tests.
        python: The interpreter.
        env: Variables of its environment.

    Returns:
        The outcome of each test, and whether none failed or was left out.
    """
    from tests.torch_utils.gpu import plain

    journal = folder / "gpu"
    for part, end in ends.items():
        command = [python, "tests/torch_utils/gpu/plain.py", kind, str(journal), part, only]
        code: int | None = 1
        done = -1
        # After a crash, which is a failure of the tests that were running, the others go on.
        while code not in (0, None) and done < len(plain.read(journal)) and time.monotonic() < end:
            done = len(plain.read(journal))
            code = limited(command, end, PYTHONPATH=paths(folder), **env)
            _note_ended(journal, code)
    tests = plain.read(journal)
    for name, _ in (each for part in ends for each in plain.chosen_tests(part, only)):
        tests.setdefault(name, {"outcome": "left out", "reason": "no time", "seconds": 0.0})
    wrong = any(test["outcome"] in ("failed", "left out") for test in tests.values())
    return {"exit_code": int(wrong), "tests": tests}


def _note_ended(journal: Path, code: int | None) -> None:
    """Record the tests that were running when their process ended."""
    from tests.torch_utils.gpu import plain

    how = "no time was left" if code is None else "its process ended"
    for name, test in plain.read(journal).items():
        if test["outcome"] == "started":
            stacks = journal.with_suffix(f".{name.partition('::')[2]}")
            text = stacks.read_text(errors="replace") if stacks.exists() else ""
            plain.note(journal, name, "failed", f"{text}\ncut off: {how}")


def announce(only: str) -> None:
    """Print which tests will be skipped because a package is missing."""
    from tests.torch_utils.gpu import plain
    from tests.torch_utils.gpu.device import missing

    for part in plain.PARTS:
        for name, test in plain.chosen_tests(part, only):
            if lacking := missing(test):
                print(f"will skip {name}: needs {', '.join(lacking)}", flush=True)


def main(*, rehearse: bool, only: str = "") -> int:
    """Run the tests; write the results unless this is a rehearsal; return the exit code."""
    from tests.torch_utils.gpu.device import Cuda

    started = time.monotonic()
    why_not = None if rehearse else Cuda.why_not()
    if why_not is not None:
        print(f"{why_not}; --rehearse runs the same tests in host memory")
        return 1
    kind = "rehearsal" if rehearse else "cuda"
    announce(only)
    slower = 10 if rehearse else 1  # A rehearsal is not about minutes.
    ends = {part: started + slower * end for part, end in ENDS_S.items()}
    with tempfile.TemporaryDirectory() as folder:
        done = on_device(Path(folder), kind, ends, only)
    seconds = round(time.monotonic() - started)
    result = {"gpu_tests": done, "seconds": seconds}
    if not rehearse:
        _write(result)
    _summarise(result)
    return int(done["exit_code"])


def _summarise(result: Mapping[str, Any]) -> None:
    tests = result["gpu_tests"]["tests"]
    outcomes = [test["outcome"] for test in tests.values()]
    counts = (f"{outcomes.count(o)} {o}" for o in ("passed", "failed", "skipped", "left out"))
    print(f"{', '.join(counts)}, in {result['seconds']} s")
    left_out = [name for name, test in tests.items() if test["outcome"] == "left out"]
    print("left out for lack of time:", ", ".join(left_out) or "nothing", flush=True)


def _write(result: Mapping[str, Any]) -> None:
    from benchmarks.gpu_setting import Setting, describe_gpu
    from benchmarks.results_file import RESULTS, commit, write_into

    about = {"commit": commit(), "gpu": describe_gpu(Setting(rehearse=False))}
    folder = Path(os.environ.get("RESULTS") or RESULTS / "gpu").resolve()
    write_into(folder, "tests", {**about, **result})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="run in host memory")
    parser.add_argument("--only", default="", help="a part of the names of the tests")
    sys.exit(main(**vars(parser.parse_args())))
