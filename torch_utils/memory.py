"""Measure memory, empty device caches and trim the heap of the host."""

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
    """The resident memory of the process, in bytes.

    Attributes:
        rss_bytes: All resident memory.
        anonymous_bytes: The heap and anonymous mappings.
        file_backed_bytes: Mapped files and shared memory. Other processes may share these pages.
    """

    rss_bytes: int = 0
    anonymous_bytes: int = 0
    file_backed_bytes: int = 0

    def __sub__(self, other: HostMemory) -> HostMemory:
        return HostMemory(*_differences(self, other))


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device, in bytes.

    Attributes:
        allocated_bytes: Memory of this process's tensors.
        reserved_bytes: Memory that torch's allocator has taken from the driver.
        free_bytes: Free memory on the device, for all processes.
        total_bytes: Size of the device's memory.
    """

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0

    def __sub__(self, other: DeviceMemory) -> DeviceMemory:
        return DeviceMemory(*_differences(self, other))


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory at one moment. ``after - before`` is the difference in bytes.

    Attributes:
        host: The resident memory of the process.
        devices: The devices in use, by their names in torch ("cuda:0").
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
        # statm has the counters of status in a tenth of the time. Its third field counts file
        # pages and shared memory; see proc(5).
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  (no import of pathlib)
            _, resident, shared = (int(word) * _PAGE_BYTES for word in file.read().split()[:3])
        return HostMemory(resident, resident - shared, shared)
    except (OSError, ValueError, NameError):  # NameError: late in shutdown `open` is gone.
        return HostMemory()


@early_bound
def memory_snapshot() -> MemorySnapshot:
    """Measure the memory of this process and of every device that it uses.

    Takes microseconds. Initialises no device, synchronises nothing, imports nothing and never
    raises.

    Returns:
        The memory in bytes. The host's numbers are 0 on systems other than Linux.
    """
    try:
        if is_shutting_down():
            return MemorySnapshot(_host_memory())
        devices = {name: DeviceMemory(**memory) for name, memory in initialized_memory().items()}
        return MemorySnapshot(_host_memory(), devices)
    except TypeError:  # Late in shutdown the classes are None.
        return MemorySnapshot()


def _is_capturing(module: Any) -> bool:
    """Return whether a CUDA graph is being captured, which emptying a cache would break.

    Call it inside the guard of a device in use: on other devices it creates a device context.
    """
    ask = getattr(module, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def captures_graph(torch: Any) -> bool:
    """Return whether this thread is capturing a CUDA graph on a device in use."""
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
                    log(
                        DEBUG,
                        "cache of %s:%d not emptied: a CUDA graph is being captured",
                        backend.name,
                        index,
                    )
                    continue
                module.empty_cache()
            emptied = True
        except Exception as error:
            # A device in an error state (illegal access, lost GPU) raises from every call.
            log(DEBUG, "cache of %s:%d not emptied: %r", backend.name, index, error)
    return emptied


@early_bound
def safe_cuda_empty_cache() -> bool:
    """Return the unused memory of torch's CUDA allocator to the driver.

    Visits only devices that this process uses: on any other device `torch.cuda.empty_cache` would
    create a device context of about 500 MB. Does nothing without torch, before CUDA is
    initialised, in a forked child of a process that uses CUDA, while this thread captures a CUDA
    graph, and during shutdown. Takes about a microsecond if there is nothing to do. Never raises.
    Safe from any thread.

    Memory that is still referenced cannot be returned; release it first.

    Returns:
        True if a cache was emptied.
    """
    try:
        torch = loaded_torch()
        if torch is None or is_shutting_down() or not torch.cuda.is_initialized():
            return False
    except Exception as error:
        # torch may be half-imported, torch.cuda None, or is_initialized may raise.
        log(DEBUG, "CUDA cache not emptied: %r", error)
        return False
    return _empty_cache(BACKENDS[0], torch)


def empty_caches() -> list[str]:
    """Empty the caches of all devices in use; return the names of the backends. Never raises."""
    torch = None if is_shutting_down() else loaded_torch()
    if torch is None:
        return []
    return [backend.name for backend in BACKENDS if _empty_cache(backend, torch)]


def trim_host() -> bool:
    """Return unused pages of the C heap to the system, by ``malloc_trim`` of glibc.

    Does nothing with other C libraries. Releases the GIL meanwhile. Never raises.

    Returns:
        True if pages were returned.
    """
    ctypes = sys.modules.get("ctypes")
    if ctypes is None or is_shutting_down() or not sys.platform.startswith("linux"):
        return False  # torch imports ctypes; without torch there is little to trim.
    try:
        # CDLL releases the GIL, unlike PyDLL. None means this process, which is 40 times faster
        # than to find the C library by its name.
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError) as error:
        log(DEBUG, "host heap not trimmed: %r", error)
        return False
