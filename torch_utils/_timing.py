"""Measure the time and the peak memory of code that uses a device.

A kernel launch returns before the kernel has run, so the host's clock alone would only measure the
launches. On CUDA the device's own events are used, on other devices a synchronised clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_utils._memory import memory_snapshot
from torch_utils._runtime import loaded_torch

__all__ = ["Measurement", "measure", "measuring"]


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
        return statistics.median(self._measured())

    def percentile_s(self, percent: float) -> float:
        """Return a percentile of ``device_s`` in seconds, by the nearest rank.

        Args:
            percent: From 0 to 100.

        Raises:
            ValueError: ``percent`` is not between 0 and 100, or there is no measurement yet.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be between 0 and 100, got {percent}")
        ordered = sorted(self._measured())
        rank = max(1, -(-len(ordered) * percent // 100))
        return ordered[int(rank) - 1]

    def _measured(self) -> list[float]:
        if not self.device_s:
            raise ValueError(f"nothing measured yet on {self.device}; read it after the block")
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
        fn: The function to measure.
        *args: Its arguments.
        warmup: Number of calls before the measurement, for compilation, caches and clocks.
        repeat: Number of measured calls.
        device: torch's name of the device that ``fn`` uses. By default the current CUDA device if
            CUDA is in use, else the CPU. No device is initialised.

    Returns:
        One entry for each measured call.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: ``warmup`` is negative, ``repeat`` is not positive, or torch lacks the device.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}; pass it without calling it")
    if warmup < 0 or repeat < 1:
        raise ValueError(f"warmup must be >= 0 and repeat >= 1, got {warmup} and {repeat}")
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
    """Measure a block. The `Measurement` is complete when the block has ended.

    All blocks share one mark of peak memory, which each block resets: an outer block sees the peak
    since the start of an inner one. On the CPU of Linux this mark is VmHWM (``ru_maxrss``).

    Args:
        device: As in `measure`.

    Raises:
        ValueError: torch lacks the device.
    """
    torch = loaded_torch()
    name = _device_name(torch, device)
    result = Measurement(name)
    kind = name.partition(":")[0]
    module = getattr(torch, kind, None)
    if kind == "cpu":
        yield from _on_host(result)
    elif not hasattr(module, "synchronize"):
        reason = "import torch first" if torch is None else "torch has no such device"
        raise ValueError(f"cannot measure on device {name!r}: {reason}")
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
    before, has_mark = memory_snapshot().host.rss_bytes, False
    with suppress(OSError):  # Reset Linux's mark of the highest resident size; see proc(5).
        has_mark = Path("/proc/self/clear_refs").write_bytes(b"5") > 0
    yield from _timed(result)
    peak = memory_snapshot().host.rss_bytes
    if has_mark:
        status = Path("/proc/self/status").read_bytes()
        peak = 1024 * int(status.partition(b"VmHWM:")[2].split()[0])
    result.peak_bytes = max(peak - before, 0)


def _timed(result: Measurement, wait: Callable[[], object] = bool) -> Iterator[Measurement]:
    started = time.perf_counter()
    yield result
    wait()
    result.host_s.append(time.perf_counter() - started)
    result.device_s.append(result.host_s[-1])


def _on_cuda(torch: Any, result: Measurement) -> Iterator[Measurement]:
    cuda = torch.cuda
    with cuda.device(result.device):
        cuda.synchronize()  # Earlier launches do not belong to this block.
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
    yield from _timed(result, module.synchronize)
    if reset is not None:
        result.peak_bytes = module.max_memory_allocated()
