"""Run the tests of this folder without pytest: `python tests/gpu/plain.py cuda RESULTS.json`."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

TESTS = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[:1] = [str(TESTS.parent), str(TESTS), str(TESTS / "torch_utils")]


def tests() -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield the tests that ask for a device, with their names."""
    for path in sorted((TESTS / "gpu").glob("test_*.py")):
        try:
            module = importlib.import_module(f"gpu.{path.stem}")
        except ModuleNotFoundError as error:
            if error.name != "pytest":
                raise
            continue  # Those that need it are not about a device.
        for name, function in vars(module).items():
            if name.startswith("test_") and "device" in inspect.signature(function).parameters:
                yield f"{path.stem}::{name}", function


def run(test: Callable[..., None], device: Any) -> tuple[str, str]:
    """Run one, and return how it went, and why."""
    try:
        device.settle()
        with tempfile.TemporaryDirectory() as folder:
            values = {"device": device, "tmp_path": Path(folder)}
            test(**{name: values[name] for name in inspect.signature(test).parameters})
    except SkipTest as reason:
        return "skipped", str(reason)
    except Exception:  # Of a test: whatever it is, the others run as well.
        return "failed", traceback.format_exc()
    return "passed", ""


def main(kind: str, results: Path, only: str = "") -> int:
    """Run all, or those with ``only`` in their names; write each down as soon as it is over."""
    from gpu.device import Cuda, Rehearsal

    chosen = {"cuda": Cuda, "rehearsal": Rehearsal}[kind]
    done: dict[str, dict[str, str]] = {}
    for name, test in tests():
        if only in name:
            outcome, reason = run(test, chosen())
            print(f"{outcome:8} {name} {reason}", flush=True)
            done[name] = {"outcome": outcome, "reason": reason[-3000:]}
            results.write_text(json.dumps(done, indent=2), encoding="utf-8")
    return int(any(test["outcome"] == "failed" for test in done.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
