"""Measure the time and the peak memory of code that uses a device.

A kernel launch returns before the kernel has run, so the host's clock alone would only measure the
launches. On CUDA the device's own events are used, on other devices a synchronised clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_utils._memory import memory_snapshot
from torch_utils._registry import ensure_ran
from torch_utils._runtime import loaded_torch


@dataclass
class Measurement:
    """Times in seconds, one for each repetition, and memory in bytes.

    Attributes:
        device: torch's name of the device.
        host_s: Seconds on the host's clock, from the call until the device had finished.
        device_s: Seconds on the device's own clock for CUDA; otherwise equal to ``host_s``.
        peak_bytes: The highest amount of memory in torch's allocator on the device. On the CPU,
            the highest growth of the process's resident memory; on systems other than Linux, its
            growth at the end.
    """

    device: str = "cpu"
    host_s: list[float] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def median_s(self) -> float:
        """The median of ``device_s``."""
        return self.percentile_s(50)

    def percentile_s(self, percent: float) -> float:
        """Return a percentile of ``device_s`` in seconds, by the nearest rank.

        Args:
            percent: From 0 to 100.

        Raises:
            ValueError: ``percent`` is not between 0 and 100, or there is no measurement yet.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be between 0 and 100, got {percent}")
        if not self.device_s:
            raise ValueError(f"nothing measured yet on {self.device}; read it after the block")
        rank = max(1, math.ceil(len(self.device_s) * percent / 100))
        return sorted(self.device_s)[rank - 1]

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
        fn: The function to measure.
        *args: Its arguments.
        warmup: Number of calls before the measurement, for compilation, caches and clocks.
        repeat: Number of measured calls.
        device: torch's name of the device that ``fn`` uses. By default the current CUDA device if
            CUDA is in use, else the CPU. No device is initialised.

    Returns:
        One entry for each measured call.

    Raises:
        TypeError: ``fn`` is not callable, or is a coroutine function or a generator function.
        ValueError: ``warmup`` is negative, ``repeat`` is not positive, or torch lacks the device.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}; pass it without calling it")
    if warmup < 0 or repeat < 1:
        raise ValueError(f"warmup must be >= 0 and repeat >= 1, got {warmup} and {repeat}")
    for _ in range(warmup):
        ensure_ran(fn(*args))
    result = Measurement()
    for _ in range(repeat):
        with measuring(device) as once:
            ensure_ran(fn(*args))
        result.device = once.device
        result.host_s += once.host_s
        result.device_s += once.device_s
        result.peak_bytes = max(result.peak_bytes, once.peak_bytes)
    return result


@contextmanager
def measuring(device: Any = None) -> Iterator[Measurement]:
    """Measure a block. The `Measurement` is complete when the block has ended.

    All blocks share one mark of peak memory, which each block resets: an outer block sees the peak
    since the start of an inner one. On the CPU of Linux this mark is VmHWM (``ru_maxrss``).

    Args:
        device: As in `measure`.

    Raises:
        ValueError: torch lacks the device.
    """
    torch: Any = loaded_torch()
    if device is None:
        is_on_cuda = torch is not None and torch.cuda.is_initialized()
        device = f"cuda:{torch.cuda.current_device()}" if is_on_cuda else "cpu"
    result = Measurement(str(device))
    kind = result.device.partition(":")[0]
    module = getattr(torch, kind, None)
    if kind == "cpu":
        yield from _on_host(result)
    elif hasattr(module, "synchronize"):
        yield from _on_device(kind, module, result)
    else:
        reason = "import torch first" if torch is None else "torch has no such device"
        raise ValueError(f"cannot measure on device {result.device!r}: {reason}")


def _on_host(result: Measurement) -> Iterator[Measurement]:
    before, has_mark = memory_snapshot().host.rss_bytes, False
    with suppress(OSError):  # Reset Linux's mark of the highest resident size; see proc(5).
        has_mark = Path("/proc/self/clear_refs").write_bytes(b"5") > 0
    started = time.perf_counter()
    yield result
    result.host_s.append(time.perf_counter() - started)
    result.device_s.append(result.host_s[-1])
    peak = memory_snapshot().host.rss_bytes
    if has_mark:
        status = Path("/proc/self/status").read_bytes()
        peak = 1024 * int(status.partition(b"VmHWM:")[2].split()[0])
    result.peak_bytes = max(peak - before, 0)


def _on_device(kind: str, module: Any, result: Measurement) -> Iterator[Measurement]:
    where = () if kind == "mps" else (result.device,)  # Metal has one device.
    module.synchronize(*where)  # Earlier launches do not belong to this block.
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(*where)
    events = [module.Event(enable_timing=True) for _ in range(2 if kind == "cuda" else 0)]
    started = time.perf_counter()
    for event in events[:1]:
        event.record(module.current_stream(*where))
    yield result
    for event in events[1:]:
        event.record(module.current_stream(*where))
    module.synchronize(*where)
    result.host_s.append(time.perf_counter() - started)
    result.device_s.append(events[0].elapsed_time(events[1]) / 1e3 if events else result.host_s[-1])
    if hasattr(module, "max_memory_allocated"):
        result.peak_bytes = module.max_memory_allocated(*where)
