"""What is in use, and giving back what nobody uses: device caches and the host's heap."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

from torch_utils._runtime import DEBUG, early_bound, is_shutting_down, loaded_torch, log
from torch_utils.devices import BACKENDS, Backend, initialized_devices, initialized_memory

__all__ = [
    "DeviceMemory",
    "HostMemory",
    "MemorySnapshot",
    "memory_snapshot",
    "safe_cuda_empty_cache",
]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class HostMemory:
    """The process's resident memory, in bytes.

    Attributes:
        rss_bytes: All of it.
        anonymous_bytes: The heap and what was mapped without a file.
        file_backed_bytes: Mapped files and shared memory. Such pages are not the process's
            alone, and go when their file is closed.
    """

    rss_bytes: int = 0
    anonymous_bytes: int = 0
    file_backed_bytes: int = 0

    def __sub__(self, other: HostMemory) -> HostMemory:
        return HostMemory(*_differences(self, other))


@dataclass(frozen=True)
class DeviceMemory:
    """One device's memory, in bytes: of this process, and free and total on the device."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0

    def __sub__(self, other: DeviceMemory) -> DeviceMemory:
        return DeviceMemory(*_differences(self, other))


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory at one moment; ``after - before`` is a difference, in signed bytes.

    Attributes:
        host: The process's resident memory.
        devices: Every device that was in use, by torch's name ("cuda:0").
    """

    host: HostMemory = field(default_factory=HostMemory)
    devices: Mapping[str, DeviceMemory] = field(default_factory=dict)

    def __sub__(self, other: MemorySnapshot) -> MemorySnapshot:
        nothing = DeviceMemory()
        names = sorted({*self.devices, *other.devices})
        return MemorySnapshot(
            self.host - other.host,
            {
                name: self.devices.get(name, nothing) - other.devices.get(name, nothing)
                for name in names
            },
        )


def _differences(left: Any, right: Any) -> list[int]:
    return [getattr(left, f.name) - getattr(right, f.name) for f in fields(left)]


def _host_memory() -> HostMemory:
    try:
        # statm rather than status: the same counters, a tenth of the time. Its third field
        # counts file pages and shared memory; see proc(5).
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  (no import of pathlib)
            _, resident, shared = (int(word) * _PAGE_BYTES for word in file.read().split()[:3])
        return HostMemory(resident, resident - shared, shared)
    except (OSError, ValueError, NameError):  # NameError: late in teardown `open` is gone.
        return HostMemory()


@early_bound
def memory_snapshot() -> MemorySnapshot:
    """Read the memory of this process and of every device it already uses.

    Takes microseconds: one small file on Linux, allocator counters elsewhere. Initialises
    nothing, synchronises nothing, imports nothing, never raises. Host figures are 0 on systems
    other than Linux.
    """
    try:
        if is_shutting_down():
            return MemorySnapshot(_host_memory())
        devices = {name: DeviceMemory(**memory) for name, memory in initialized_memory().items()}
        return MemorySnapshot(_host_memory(), devices)
    except TypeError:  # Late in teardown: what this is made of is None already.
        return MemorySnapshot()


def _is_capturing(module: Any) -> bool:
    """Say whether a CUDA graph is being captured here; giving memory back would spoil it.

    Asked inside the device's guard: for a device without a context, asking would make one.
    """
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def captures_graph(torch: Any) -> bool:
    """Say whether this thread captures a CUDA graph on any of the devices in use."""
    for index in initialized_devices(BACKENDS[0], torch):
        with torch.cuda.device(index):
            if _is_capturing(torch.cuda):
                return True
    return False


def _empty_cache(backend: Backend, torch: Any) -> bool:
    module = backend.module(torch)
    emptied = False
    for index in initialized_devices(backend, torch):
        try:
            with module.device(index) if hasattr(module, "device") else nullcontext():
                if _is_capturing(module):
                    log(DEBUG, "cache of %s:%d not emptied: a capture", backend.name, index)
                    continue
                module.empty_cache()
            emptied = True
        except Exception as error:
            # A device in an error state (an illegal access, a lost GPU) raises from every call.
            log(DEBUG, "cache of %s:%d not emptied: %r", backend.name, index, error)
    return emptied


@early_bound
def safe_cuda_empty_cache() -> bool:
    """Return the CUDA allocator's unused memory to the driver, where there is any.

    Visits only devices that this process already uses, each inside its own device guard: on
    any other, `torch.cuda.empty_cache` would create a context of some 500 MB. Does nothing
    without torch, before CUDA is initialised, in a forked child of a process that uses CUDA,
    while this thread captures a CUDA graph, and while the program ends, when the driver takes
    everything back anyway. Costs about a microsecond when there is nothing to do. Never raises.
    Safe from any thread.

    What it cannot give back is whatever something still refers to: release that first.

    Returns:
        True if a cache was emptied.
    """
    try:
        torch = loaded_torch()
        if torch is None or is_shutting_down() or not torch.cuda.is_initialized():
            return False
    except Exception as error:
        # torch half-imported, torch.cuda replaced by None, is_initialized raising.
        log(DEBUG, "CUDA cache not emptied: %r", error)
        return False
    return _empty_cache(BACKENDS[0], torch)


def empty_caches() -> list[str]:
    """Empty the caches of every backend in use, and name the backends. Never raises."""
    torch = None if is_shutting_down() else loaded_torch()
    if torch is None:
        return []
    return [backend.name for backend in BACKENDS if _empty_cache(backend, torch)]


def trim_host() -> bool:
    """Return the C heap's unused pages to the system: ``malloc_trim`` of glibc.

    Other C libraries keep no such reserve and have no such call. Runs without the GIL, so
    other threads go on meanwhile. Never raises.

    Returns:
        True if pages went back.
    """
    ctypes = sys.modules.get("ctypes")
    if ctypes is None or is_shutting_down() or not sys.platform.startswith("linux"):
        return False  # ctypes comes with torch; without torch there is nothing worth trimming.
    try:
        # CDLL, not PyDLL: it lets go of the GIL. None is this very process, 40 times faster to
        # find than the C library by its name.
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError) as error:
        log(DEBUG, "host heap not trimmed: %r", error)
        return False
