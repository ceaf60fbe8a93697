"""GPU memory that processes hold, asked of the driver (NVML), if pynvml is installed."""

from __future__ import annotations

import sys
from types import ModuleType


def memory_of_processes() -> dict[int, int]:
    """Return the bytes of GPU memory that each process holds, by its id; empty without NVML."""
    nvml = _nvml()
    if nvml is None:
        return {}
    held: dict[int, int] = {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # No driver.
        return {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                # None where the driver does not tell, as in some containers.
                held[process.pid] = held.get(process.pid, 0) + (process.usedGpuMemory or 0)
    except nvml.NVMLError:
        return held
    finally:
        nvml.nvmlShutdown()
    return held


def _nvml() -> ModuleType | None:
    try:
        import pynvml
    except ImportError:
        return None
    module: ModuleType = sys.modules[pynvml.__name__]
    return module
