"""The device of the GPU benchmarks: its size and the remaining time."""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from torch_utils import Measurement, measure, release

GB = 10**9


class Setting:
    """One run of the benchmarks.

    Attributes:
        device: torch's name of the device.
        deadline: When the running part must end, on the monotonic clock, in seconds.
    """

    def __init__(self, *, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.device = "cpu" if rehearse else "cuda:0"
        self.deadline = float("inf")

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def room_bytes(self) -> int:
        """Return how many bytes may be allocated on the device, with a reserve."""
        if self.rehearse:
            return 1 << 28
        free, _ = torch.cuda.mem_get_info(0)
        cached = torch.cuda.memory_reserved(0) - torch.cuda.memory_allocated(0)
        return int(0.9 * (free + cached))

    def reserved_bytes(self) -> int:
        return 0 if self.rehearse else torch.cuda.memory_reserved(0)

    def synchronize(self) -> None:
        if not self.rehearse:
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Free what a part has left, so that the next part has the whole card."""
        gc.collect()
        release(thorough=True)

    def timed(self, work: Callable[[], Any], *, most: int = 20, most_s: float = 1.0) -> Measurement:
        """Measure repeatedly; slow work is measured fewer times."""
        if self.rehearse:
            return measure(work, warmup=0, repeat=1, device=self.device)
        work()
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        once = max(time.perf_counter() - started, 1e-6)
        return measure(work, repeat=max(3, min(most, int(most_s / once))), device=self.device)


def describe_gpu(setting: Setting) -> dict[str, Any]:
    """Describe the card and its driver."""
    if setting.rehearse:
        return {"name": "none: a rehearsal"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "gpus": torch.cuda.device_count(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
