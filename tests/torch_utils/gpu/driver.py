"""Query the driver about contexts and processes, without a context of this process.

Open files of the driver prove nothing: NVML opens ``nvidia-uvm`` as well.
"""

import ctypes
from typing import Any

_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_MOST_PROCESSES = 1024


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def is_initialized() -> bool:
    """Return whether this process has called cuInit; a child that it forks has not."""
    count = ctypes.c_int()
    error = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count))
    return bool(error != _NOT_INITIALIZED)


def bytes_of_processes() -> dict[int, int]:
    """Return the memory of each process that has a context, by its pid, from NVML."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    _check(nvml.nvmlInit_v2())
    try:
        found: dict[int, int] = {}
        count = ctypes.c_uint()
        _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        for number in range(count.value):
            for process in _processes(nvml, number):
                found[process.pid] = found.get(process.pid, 0) + process.used_bytes
        return found
    finally:
        nvml.nvmlShutdown()


def _processes(nvml: Any, number: int) -> Any:
    handle, length = ctypes.c_void_p(), ctypes.c_uint(_MOST_PROCESSES)
    entries = (_Process * _MOST_PROCESSES)()
    _check(nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)))
    _check(nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(length), entries))
    return entries[: length.value]


def _check(error: int) -> None:
    if error:
        raise OSError(f"NVML failed with error {error}")
