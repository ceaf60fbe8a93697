"""Queries about devices that change nothing.

No function here raises, creates a device context, or imports torch during shutdown.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypedDict

from torch_utils._runtime import cuda_is_of_parent, early_bound, import_torch, is_shutting_down
from torch_utils.memory import BACKENDS, devices_in_use, memory_snapshot, query

__all__ = ["DeviceInfo", "get_device_info", "get_optimal_device", "is_cuda_available"]


class DeviceInfo(TypedDict):
    """The result of `get_device_info`.

    ``memory`` has the devices that are in use, each with its ``allocated_bytes``,
    ``reserved_bytes``, ``free_bytes`` and ``total_bytes``.
    """

    cuda_available: bool
    device_count: int
    current_device: int | None
    device_name: str
    backend: str
    torch_version: str | None
    memory: dict[str, dict[str, int]]


def _cuda_is_available(torch: Any) -> bool:
    """Return whether CUDA is available without cuInit, which disables CUDA in later forks.

    See vllm#32611. `torch.cuda.device_count` asks NVML, and the driver only if NVML is missing, as
    `torch.cuda.is_available` does with PYTORCH_NVML_BASED_CUDA_CHECK=1. If the program has set
    that variable, its choice wins. A forked child of a process that used CUDA cannot use it.
    """
    if cuda_is_of_parent(torch):
        return False
    if "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ:
        return bool(torch.cuda.is_available())
    return int(torch.cuda.device_count()) > 0


_IS_AVAILABLE: dict[str, Callable[[Any], bool]] = {
    "cuda": _cuda_is_available,
    "xpu": lambda torch: bool(torch.xpu.is_available()),
    "mps": lambda torch: bool(torch.backends.mps.is_available()),
}


def _is_available(backend: str, torch: Any) -> bool:
    available: bool = query(lambda: _IS_AVAILABLE[backend](torch), False, f"is {backend} available")
    return available


@early_bound
def is_cuda_available() -> bool:
    """Return whether CUDA (or ROCm) can be used.

    Imports torch unless the program is ending. Creates no device context, so the process may still
    fork afterwards. Never raises.

    Returns:
        True if it can be used. False if torch is missing, half-imported or broken, in a forked
        child of a process that used CUDA, and during shutdown.
    """
    torch = None if is_shutting_down() else import_torch()
    return torch is not None and _is_available("cuda", torch)


@early_bound
def get_optimal_device(force_cpu: bool = False) -> str:
    """Return the name of the best available device. Never raises for a valid argument.

    Args:
        force_cpu: Return "cpu" without any query.

    Returns:
        "cuda", "xpu", "mps" or "cpu". "cpu" also without torch and during shutdown.

    Raises:
        TypeError: ``force_cpu`` is neither True nor False, such as the name of a device.
    """
    if force_cpu is not True and force_cpu is not False:
        raise TypeError(
            f"force_cpu must be True or False, got {force_cpu!r}; the function chooses the device"
        )
    torch = None if force_cpu or is_shutting_down() else import_torch()
    if torch is None:
        return "cpu"
    return next((backend for backend in BACKENDS if _is_available(backend, torch)), "cpu")


@early_bound
def get_device_info() -> DeviceInfo:
    """Describe torch's devices without initialising one. Never raises.

    For a backend that the program has not used yet, ``current_device`` is None and ``memory`` is
    empty: to query them would create a device context of about 500 MB.

    Returns:
        A dictionary, see `DeviceInfo`. Memory is in bytes, by the name of the device in torch.
    """
    info = DeviceInfo(
        cuda_available=False,
        device_count=0,
        current_device=None,
        device_name="cpu",
        backend="cpu",
        torch_version=None,
        memory={},
    )
    torch = None if is_shutting_down() else import_torch()
    if torch is None:
        return info
    info["torch_version"] = query(lambda: str(torch.__version__), None, "torch's version")
    info["cuda_available"] = is_cuda_available()
    info["backend"] = info["device_name"] = backend = get_optimal_device()
    info["memory"] = {name: asdict(one) for name, one in memory_snapshot().devices.items()}
    if backend == "cpu":
        return info
    module = query(lambda: getattr(torch, backend), None, backend)
    info["device_count"] = query(lambda: int(module.device_count()), 1, "device_count")
    in_use = devices_in_use(backend, torch)
    if in_use:
        current = query(lambda: int(module.current_device()), in_use[0], "current_device")
        name = query(lambda: str(module.get_device_name(current)), backend, "device name")
        info["current_device"], info["device_name"] = current, name
    return info
