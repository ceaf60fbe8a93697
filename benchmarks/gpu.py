"""Compare releases, searches and encoding on a GPU with other libraries.

It runs unattended, within 150 seconds, on any Python with torch. It first lists what it leaves out
for lack of a package, and at the end what it left out for lack of time. Sizes follow the memory of
the card. Each row is written at once, into the folder that RESULTS names (default
``benchmarks/results/gpu``). ``--seconds 1500`` also searches ten million documents. ``--rehearse``
runs small sizes on the CPU and writes nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # before the import of torch, which takes seconds
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

from benchmarks import results_file

# The most important part first. Each has a share of the time, and what earlier parts did not use.
SHARES = {"release": 0.33, "search": 0.38, "encode": 0.25, "measure": 0.04}
FUNCTIONS = {
    "release": ("gpu_release", "release_beside_others"),
    "search": ("gpu_search", "search"),
    "encode": ("gpu_encode", "encode"),
    "measure": ("gpu_release", "measure_beside_triton"),
}
# What a part cannot do without, and what it compares with.
NEEDS = {
    "search": ("numpy", "tantivy", "Stemmer"),
    "encode": ("numpy", "transformers", "sentence_transformers"),
}
PEERS = {
    "release": ("accelerate", "transformers"),
    "search": ("sentence_transformers",),
    "measure": ("triton",),
}

Row = dict[str, Any]


def missing(packages: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
    """Return the packages that each part lacks."""
    lacking = {part: [name for name in names if not find_spec(name)]
               for part, names in packages.items()}  # fmt: skip
    return {part: names for part, names in lacking.items() if names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=140.0, help="for all of it")
    parser.add_argument("--part", action="append", choices=SHARES)
    options = parser.parse_args()

    from torch_utils import is_cuda_available

    if not options.rehearse and not is_cuda_available():
        print("benchmarks.gpu needs a CUDA device; --rehearse runs small sizes on the CPU")
        return 1
    started, failed = STARTED, 0
    left_out = [f"{part} (needs {', '.join(names)})" for part, names in missing(NEEDS).items()]
    for part in left_out:
        print(f"will leave out {part}")
    for part, names in missing(PEERS).items():
        print(f"will measure {part} without {', '.join(names)}", flush=True)
    # If a part hangs, the rows before it are already written.
    limit_s = options.seconds + 8 - (time.monotonic() - started)
    faulthandler.dump_traceback_later(max(1.0, limit_s), exit=True)
    from benchmarks.gpu_setting import Setting, describe_gpu

    if options.rehearse:
        import torch

        torch.set_num_threads(1)
    setting = Setting(rehearse=options.rehearse)
    about = {"commit": results_file.commit(), "gpu": describe_gpu(setting)}
    print(about, flush=True)
    due = 0.0
    for name, (module, function) in FUNCTIONS.items():
        due += SHARES[name] * options.seconds
        if name in missing(NEEDS) or name not in (options.part or SHARES):
            continue
        setting.deadline = started + due
        print(f"\n== {name}, at {time.monotonic() - started:.0f} s", flush=True)
        try:
            part = getattr(importlib.import_module(f"benchmarks.{module}"), function)
            left_out += _measure(name, part(setting), about, rehearse=options.rehearse)
        except Exception:  # An error ends one part only.
            traceback.print_exc()
            failed += 1
        finally:
            setting.tidy()
    faulthandler.cancel_dump_traceback_later()
    print(f"\n{time.monotonic() - started:.0f} s, {failed} parts failed")
    print("left out:", "; ".join(left_out) or "nothing")
    return int(failed > 0)


def _measure(name: str, part: Iterator[Row], about: Row, *, rehearse: bool) -> list[str]:
    """Print and write the rows of a part; return what it left out."""
    rows: list[Row] = []
    for row in part:
        rows.append(row)
        print(json.dumps(row), flush=True)
        if not rehearse:
            folder = os.environ.get("RESULTS") or results_file.RESULTS / "gpu"
            results_file.write_into(Path(folder).resolve(), name, {**about, "rows": rows})
    return [f"{name} {row}" for row in rows if "left_out" in row]


if __name__ == "__main__":
    sys.exit(main())
