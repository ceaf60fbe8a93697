"""measure: time and peak memory of code that uses a device, done right.

A kernel launch returns before the kernel has run. Host time alone would measure how fast work
is put into a queue; so the device's own events are used on CUDA, and a synchronised clock on
other devices.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_utils._runtime import loaded_torch
from torch_utils.memory import memory_snapshot

__all__ = ["Measurement", "measure", "measuring"]


@dataclass
class Measurement:
    """Times in seconds, one for each repetition, and memory in bytes.

    Attributes:
        host_s: From the call until the device had finished, on the host's clock.
        device_s: On the device's own clock, for CUDA; elsewhere the same as ``host_s``.
        peak_bytes: The most that torch's allocator held on the device meanwhile. On the CPU, by
            how much the process's resident memory exceeded, at its highest, what it was at the
            start; where the system keeps no such mark (not on Linux), by how much it had grown
            at the end.
        device: torch's name of the device.
    """

    device: str = "cpu"
    host_s: list[float] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def median_s(self) -> float:
        """The median of ``device_s``."""
        return statistics.median(self._measured())

    def percentile_s(self, percent: float) -> float:
        """Return a percentile of ``device_s``, by the nearest rank.

        Raises:
            ValueError: ``percent`` is not between 0 and 100, or nothing was measured yet.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be between 0 and 100, not {percent}")
        ordered = sorted(self._measured())
        rank = max(1, -(-len(ordered) * percent // 100))
        return ordered[int(rank) - 1]

    def _measured(self) -> list[float]:
        if not self.device_s:
            raise ValueError(f"nothing measured yet on {self.device}: the block has not ended")
        return self.device_s

    def __str__(self) -> str:
        if not self.device_s:
            return f"nothing measured yet on {self.device}"
        low, high = self.percentile_s(5), self.percentile_s(95)
        return (
            f"{self.median_s * 1e3:.3f} ms on {self.device} (median of {len(self.device_s)}; "
            f"5%: {low * 1e3:.3f}, 95%: {high * 1e3:.3f}), peak {self.peak_bytes:,} bytes"
        )


def measure(
    fn: Callable[..., Any], *args: Any, warmup: int = 3, repeat: int = 20, device: Any = None
) -> Measurement:
    """Call a function repeatedly and measure each call until its work has finished.

    Args:
        fn: What to measure.
        *args: Its arguments.
        warmup: Calls before the first that counts: compilation, caches, clocks.
        repeat: Calls that count.
        device: torch's name of the device that it works on; by default the CUDA device that is
            in use, or the CPU. Never initialises one.

    Raises:
        TypeError: ``fn`` is no function.
        ValueError: ``warmup`` is negative, ``repeat`` is not positive, or there is no such device.
    """
    if warmup < 0 or repeat < 1:
        raise ValueError(f"needs warmup >= 0 and repeat >= 1, not {warmup} and {repeat}")
    for _ in range(warmup):
        fn(*args)
    result = Measurement()
    for _ in range(repeat):
        with measuring(device) as once:
            fn(*args)
        result.device = once.device
        result.host_s += once.host_s
        result.device_s += once.device_s
        result.peak_bytes = max(result.peak_bytes, once.peak_bytes)
    return result


@contextmanager
def measuring(device: Any = None) -> Iterator[Measurement]:
    """Measure a block; the `Measurement` is filled when the block has ended.

    There is one mark of peak memory for all: each block resets it, so of blocks that overlap the
    outer one sees the peak since the inner one began. On the CPU of Linux that is the mark of the
    process's highest resident size (VmHWM, ``ru_maxrss``).

    Args:
        device: As in `measure`.

    Raises:
        ValueError: There is no such device.
    """
    torch = loaded_torch()
    name = _device_name(torch, device)
    result = Measurement(name)
    kind = name.partition(":")[0]
    module = getattr(torch, kind, None)
    if kind == "cpu":
        yield from _on_host(result)
    elif not hasattr(module, "synchronize"):
        raise ValueError(
            f"cannot measure on device {name!r}: import torch first, and name a device of torch's"
        )
    elif kind == "cuda":
        yield from _on_cuda(torch, result)
    else:
        yield from _with_synchronisation(module, result)


def _device_name(torch: Any, device: Any) -> str:
    if device is not None:
        return str(device)
    if torch is not None and torch.cuda.is_initialized():
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def _on_host(result: Measurement) -> Iterator[Measurement]:
    before = memory_snapshot().host.rss_bytes
    has_mark = _reset_high_water_mark()
    started = time.perf_counter()
    yield result
    seconds = time.perf_counter() - started
    result.host_s.append(seconds)
    result.device_s.append(seconds)
    peak = _high_water_mark() if has_mark else memory_snapshot().host.rss_bytes
    result.peak_bytes = max(peak - before, 0)


def _reset_high_water_mark() -> bool:
    """Make Linux forget the highest resident size so far (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_bytes(b"5")
    except OSError:
        return False
    return True


def _high_water_mark() -> int:
    status = Path("/proc/self/status").read_bytes().splitlines()
    return 1024 * next(int(line.split()[1]) for line in status if line.startswith(b"VmHWM:"))


def _on_cuda(torch: Any, result: Measurement) -> Iterator[Measurement]:
    cuda = torch.cuda
    with cuda.device(result.device):
        cuda.synchronize()  # What was launched earlier is not this block's work.
        cuda.reset_peak_memory_stats()
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        begin.record()
    yield result
    with cuda.device(result.device):
        end.record()
        end.synchronize()
        result.host_s.append(time.perf_counter() - started)
        result.device_s.append(begin.elapsed_time(end) / 1e3)
        result.peak_bytes = cuda.max_memory_allocated()


def _with_synchronisation(module: Any, result: Measurement) -> Iterator[Measurement]:
    reset = getattr(module, "reset_peak_memory_stats", None)
    module.synchronize()
    if reset is not None:
        reset()
    started = time.perf_counter()
    yield result
    module.synchronize()
    seconds = time.perf_counter() - started
    result.host_s.append(seconds)
    result.device_s.append(seconds)
    if reset is not None:
        result.peak_bytes = module.max_memory_allocated()
