"""Run one part of the tests of this folder: ``plain.py cuda JOURNAL PART [PART OF A NAME]``.

It needs no pytest. The tests of the part "alone" have the whole card. Those of the others run up
to six at a time, each in a process that counts its own memory. The journal records the start and
the end of each test. After a test that hangs, crashes or fails, the next one runs in a new process,
which finds the device clean.
"""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import json
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

HERE = Path(__file__).resolve().parent
PARTS = ("alone", "beside", "last")
AT_ONCE = min(6, os.cpu_count() or 1)
# The most important tests come first.
FIRST = ("test_memory_is_back", "test_shared_use", "test_no_context")
if __name__ == "__main__":
    sys.path[:1] = [str(HERE.parents[2])]


def tests() -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield the names and functions of the tests that take a device."""
    files = {path.stem for path in HERE.glob("test_*.py")}
    for stem in (*FIRST, *sorted(files - {*FIRST})):
        try:
            module = importlib.import_module(f"tests.torch_utils.gpu.{stem}")
        except ModuleNotFoundError as error:
            if error.name != "pytest":
                raise
            continue  # A file that needs pytest does not test a device.
        for name, function in vars(module).items():
            if name.startswith("test_") and "device" in inspect.signature(function).parameters:
                yield f"{stem}::{name}", function


def part_of(test: Callable[..., None]) -> str:
    """Return the part in which a test runs."""
    return str(getattr(test, "part", "beside"))


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


def chosen_tests(part: str, only: str) -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield the tests of a part whose names contain a text."""
    for name, test in tests():
        if part_of(test) == part and only in name:
            yield name, test


def main(kind: str, journal: Path, part: str, only: str = "") -> None:
    """Run the tests that the journal lacks."""
    from tests.support import programs

    done, chosen = read(journal), device_of(kind)
    programs.TIMEOUT_S = round(0.8 * chosen.test_s)
    waiting = []
    for name, test in chosen_tests(part, only):
        why_not = chosen.skipped.get(name) or chosen.skipped.get(name.partition("::")[0])
        if why_not:
            note(journal, name, "skipped", why_not)
        elif name not in done:
            waiting.append((name, test))
    run_in_forks(journal, waiting, chosen, 1 if part == "alone" else AT_ONCE)


def device_of(kind: str) -> type[Any]:
    """Return the class of a device by its name."""
    from tests.torch_utils.gpu.device import Cuda, Rehearsal
    from tests.torch_utils.gpu.stand_in.device import StandIn

    return {"cuda": Cuda, "rehearsal": Rehearsal, "stand-in": StandIn}[kind]


def run_and_note(journal: Path, name: str, test: Callable[..., None], device: Any) -> bool:
    """Run a test and record it; return whether it has not failed."""
    note(journal, name, "started")
    with journal.with_suffix(f".{name.partition('::')[2]}").open("w") as stacks:
        faulthandler.dump_traceback_later(device.test_s, exit=True, file=stacks)
        started = time.monotonic()
        outcome, reason = run(test, device)
        faulthandler.cancel_dump_traceback_later()
    seconds = round(time.monotonic() - started, 1)
    print(f"{outcome:8} {seconds:6.1f} s {name} {reason}", flush=True)
    note(journal, name, outcome, reason, seconds)
    return outcome != "failed"


def run_in_forks(
    journal: Path, waiting: list[tuple[str, Callable[..., None]]], kind: type[Any], at_once: int
) -> None:
    """Run tests in forks of this process, which never uses the device."""
    context = multiprocessing.get_context("fork")
    number = context.Value("i", 0)

    def work() -> None:
        while True:
            with number.get_lock():
                turn, number.value = number.value, number.value + 1
            if turn >= len(waiting):
                return
            name, test = waiting[turn]
            if not run_and_note(journal, name, test, kind()):
                return

    workers: set[Any] = set()
    while number.value < len(waiting) or workers:
        while len(workers) < at_once and number.value < len(waiting):
            worker = context.Process(target=work)
            worker.start()
            workers.add(worker)
        multiprocessing.connection.wait([worker.sentinel for worker in workers])
        workers = {worker for worker in workers if worker.is_alive()}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
