"""The GPU memory of processes, as the driver (NVML) reports it if pynvml is installed."""

from __future__ import annotations

import os
from types import ModuleType

_FIRST_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of Linux


def memory_of_processes() -> dict[int, int]:
    """Return the GPU memory of each process in bytes, by process id.

    Empty without NVML, and in a container, where the driver reports ids of another namespace.
    """
    nvml = _nvml()
    held: dict[int, int] = {}
    if nvml is None or not _is_first_namespace():
        return held
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # No driver.
        return {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                # The driver may not know the memory of a process (None).
                held[process.pid] = held.get(process.pid, 0) + (process.usedGpuMemory or 0)
    except nvml.NVMLError:
        return held
    finally:
        nvml.nvmlShutdown()
    return held


def _is_first_namespace() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE  # noqa: PTH115
    except OSError:  # Not Linux.
        return False


def _nvml() -> ModuleType | None:
    try:
        import pynvml
    except (ImportError, Warning):  # A deprecated pynvml warns, which may be an error.
        return None
    module: ModuleType = pynvml
    return module
