"""`make bench-gpu`: compare searches, encoding and releases on a GPU with other libraries.

It runs unattended, within eight minutes, on any Python with torch. Sizes follow the memory of the
card. A part without time left is recorded as left out. Each part writes a file into the folder that
RESULTS names (default ``benchmarks/results/gpu``) as soon as it is measured. ``--rehearse`` runs
small sizes on the CPU and writes nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

from benchmarks import results_file

# The most important part first, each with its share of the time.
SHARES = {
    "bandwidth": 0.05,
    "search": 0.40,
    "release": 0.15,
    "measure": 0.05,
    "encode": 0.20,
    "streamed": 0.15,
}


def parts() -> dict[str, Callable[[Any], Any]]:
    """Import the slow modules, and return the parts by name."""
    from benchmarks import gpu_encode, gpu_release, gpu_search

    return {
        "bandwidth": lambda setting: setting.bandwidth(),
        "search": gpu_search.search,
        "release": gpu_release.release_beside_others,
        "measure": gpu_release.measure_beside_triton,
        "encode": gpu_encode.encode,
        "streamed": gpu_search.streamed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--seconds", type=float, default=430.0, help="for all of it")
    parser.add_argument("--part", action="append", choices=SHARES)
    options = parser.parse_args()

    from torch_utils import is_cuda_available

    if not options.rehearse and not is_cuda_available():
        print("bench-gpu needs a CUDA device; --rehearse runs small sizes on the CPU")
        return 1
    # If a part hangs, the results of the earlier parts are already written.
    faulthandler.dump_traceback_later(options.seconds + 30, exit=True)
    started, failed = time.monotonic(), 0
    from benchmarks.gpu_setting import Setting, describe_gpu

    if options.rehearse:
        import torch

        torch.set_num_threads(1)
    setting = Setting(rehearse=options.rehearse)
    gpu = describe_gpu(setting)
    print(gpu, flush=True)
    for name, part in parts().items():
        if options.part and name not in options.part and name != "bandwidth":
            continue
        # Later parts get the time that earlier parts did not use.
        used, due = time.monotonic() - started, _share_until(name) * options.seconds
        setting.deadline = time.monotonic() + max(SHARES[name] * options.seconds, due - used)
        setting.deadline = min(setting.deadline, started + options.seconds)
        print(f"\n== {name}, at {used:.0f} s", flush=True)
        try:
            result = part(setting)
        except Exception:
            # An error ends one part only.
            traceback.print_exc()
            failed += 1
            continue
        finally:
            setting.tidy()
        if not options.rehearse:
            _write(name, {"gpu": gpu, "bandwidth": setting.rates, name: result})
    faulthandler.cancel_dump_traceback_later()
    print(f"\n{time.monotonic() - started:.0f} s, {failed} parts failed")
    return int(failed > 0)


def _share_until(wanted: str) -> float:
    total = 0.0
    for name, share in SHARES.items():
        total += share
        if name == wanted:
            break
    return total


def _write(name: str, result: dict[str, Any]) -> None:
    if os.environ.get("RESULTS"):
        results_file.RESULTS = Path(os.environ["RESULTS"]).resolve()
        results_file.write(name, result)
    else:
        (results_file.RESULTS / "gpu").mkdir(exist_ok=True)
        results_file.write(f"gpu/{name}", result)


if __name__ == "__main__":
    sys.exit(main())
