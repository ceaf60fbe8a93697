"""Run the tests of this folder, with pytest or without: `plain.py cuda JOURNAL [PART OF A NAME]`.

The journal records the start and the end of each test. After a test that hangs, crashes or fails,
`run.py` continues with the next one in a new process, which finds the device clean.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

TESTS = Path(__file__).resolve().parent.parent
TEST_S = 100.0  # A test that takes longer hangs.
# The most important tests come first.
FIRST = ("test_memory_is_back", "test_shared_use", "test_no_context")
if __name__ == "__main__":
    sys.path[:1] = [str(TESTS.parent), str(TESTS), str(TESTS / "torch_utils")]


def tests() -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield the names and functions of the tests that take a device."""
    files = {path.stem for path in (TESTS / "gpu").glob("test_*.py")}
    for stem in (*FIRST, *sorted(files - {*FIRST})):
        try:
            module = importlib.import_module(f"gpu.{stem}")
        except ModuleNotFoundError as error:
            if error.name != "pytest":
                raise
            continue  # A file that needs pytest does not test a device.
        for name, function in vars(module).items():
            if name.startswith("test_") and "device" in inspect.signature(function).parameters:
                yield f"{stem}::{name}", function


def run(test: Callable[..., None], device: Any) -> tuple[str, str]:
    """Run a test; return its outcome and the reason."""
    try:
        device.settle()
        with tempfile.TemporaryDirectory() as folder:
            values = {"device": device, "tmp_path": Path(folder)}
            test(**{name: values[name] for name in inspect.signature(test).parameters})
    except SkipTest as reason:
        return "skipped", str(reason)
    except subprocess.TimeoutExpired as late:  # with the output of its program so far
        return "failed", f"{traceback.format_exc()}\n{late.stdout!r}\n{late.stderr!r}"
    except Exception:  # A test may raise anything, and the others still run.
        return "failed", traceback.format_exc()
    return "passed", ""


def read(journal: Path) -> dict[str, dict[str, Any]]:
    """Return the last entry of each test."""
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    return {entry.pop("test"): entry for entry in map(json.loads, lines)}


def note(journal: Path, test: str, outcome: str, reason: str = "", seconds: float = 0.0) -> None:
    """Append the outcome of a test to the journal."""
    entry = {"test": test, "outcome": outcome, "reason": reason[-3000:], "seconds": seconds}
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def rewrite_asserts() -> None:
    """Make failing asserts print the compared values, if pytest is installed."""
    try:
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config()).mark_rewrite("gpu")
    except Exception as error:  # Another version may lack these private functions.
        print(f"asserts are not rewritten: {error!r}", flush=True)


def main(kind: str, journal: Path, only: str = "") -> int:
    """Run the tests that the journal lacks, up to the first failure."""
    rewrite_asserts()
    from gpu.device import Cuda, Rehearsal
    from gpu.stand_in.device import StandIn
    from support import programs

    programs.TIMEOUT_S = round(0.8 * TEST_S)

    chosen = {"cuda": Cuda, "rehearsal": Rehearsal, "stand-in": StandIn}[kind]
    done = read(journal)
    with journal.with_suffix(".stacks").open("w") as stacks:
        for name, test in tests():
            is_slow = chosen is Rehearsal and hasattr(test, "has_slow_rehearsal")
            if name in done or (only not in name) or (is_slow and not only):
                continue
            if name in chosen.skipped:
                note(journal, name, "skipped", chosen.skipped[name])
                continue
            note(journal, name, "started")
            faulthandler.dump_traceback_later(TEST_S, exit=True, file=stacks)
            started = time.monotonic()
            outcome, reason = run(test, chosen())
            faulthandler.cancel_dump_traceback_later()
            seconds = round(time.monotonic() - started, 1)
            print(f"{outcome:8} {seconds:6.1f} s {name} {reason}", flush=True)
            note(journal, name, outcome, reason, seconds)
            if outcome == "failed":
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
